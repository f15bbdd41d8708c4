"""Kernels compiled for GPUs, without a GPU."""

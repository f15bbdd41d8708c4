"""Kernels, layers and policy on a CUDA GPU."""

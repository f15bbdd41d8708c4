"""Triton kernels in its interpreter, on a CPU."""

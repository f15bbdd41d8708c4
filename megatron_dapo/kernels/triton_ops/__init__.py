"""The kernels in Triton, one module per operation, imported by its dispatcher only on a GPU."""

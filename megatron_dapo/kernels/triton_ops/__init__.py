"""The kernels in Triton, one module per operation, imported by its dispatcher only where a GPU is there to run it."""

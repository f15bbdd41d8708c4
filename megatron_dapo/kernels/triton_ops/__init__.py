"""The kernels in Triton, one module per operation, each imported by its dispatcher only when a GPU is there to run it."""

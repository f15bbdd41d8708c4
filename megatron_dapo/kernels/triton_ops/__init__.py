"""The kernels in Triton, one module per kernel, each imported by its dispatcher only when a GPU is there to run it."""

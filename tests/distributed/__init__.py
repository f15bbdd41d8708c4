"""Several processes under torchrun, over gloo."""

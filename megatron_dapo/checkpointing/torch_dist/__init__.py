"""Model, optimizer and generators of a run in Megatron's `torch_dist` format: saved once, loaded at
any layout.

A tensor is stored whole, in the model's own shape, under Megatron's name. Only the slices written
by the ranks reflect tensor, pipeline and data parallelism; no padding is stored.
"""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # must run before a module of this package imports megatron.core

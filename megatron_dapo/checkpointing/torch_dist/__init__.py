"""Model, optimizer and generators of a run in Megatron's `torch_dist` format: saved once, loaded at any layout.

A tensor is stored under Megatron's name of it as one whole, of the model's own shape: where tensor, pipeline and data
parallelism cut it shows only in the slices that the ranks wrote, and no padding is stored.
"""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # everything below imports megatron.core, which must not come first

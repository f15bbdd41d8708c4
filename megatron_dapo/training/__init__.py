"""Forward and backward over packed micro-batches: policy, reference, critic, optimizer, a rank's share of a step."""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # everything below imports megatron.core, which must not come first

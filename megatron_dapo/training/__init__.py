"""Forward and backward over packed micro-batches: policy, reference, critic, optimizer, a rank's
share of a step."""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # must come before the imports of megatron.core below

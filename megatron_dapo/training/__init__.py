"""Forward and backward over packed micro-batches: policy, reference, critic, optimizer, a rank's
share of a step."""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # before megatron.core is imported, as all modules here do

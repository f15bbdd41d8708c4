"""Forward and backward over packed micro-batches: policy, reference, critic, optimizer, a rank's
share of a step."""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # must run before a module of this package imports megatron.core

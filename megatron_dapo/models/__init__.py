"""Megatron models of Hugging Face checkpoints: building, the log-prob head, and the weight maps."""

from megatron_dapo.platform.device import prepare_megatron

prepare_megatron()  # everything below imports megatron.core, which must not come first

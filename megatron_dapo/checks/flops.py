"""Floating-point operations of a model, counted as papers count them, so that runs can be compared by MFU."""

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_dapo.checks.memory import adapter_parameters
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import product_weights

TRAINING_PASSES = 3
"""Forward, and a backward of twice its products. What recomputation repeats does not count (PaLM, arXiv 2204.02311,
appendix B: model FLOPs, not hardware FLOPs)."""


def forward_flops(spec: ModelSpec, lengths: Iterable[int], num_answered: int, lora: LoraSettings | None = None) -> int:
    """Count the operations of one pass over samples of these lengths, packed or not: padding does not count.

    Two operations per parameter of a product and token, and causal attention over the keys that a token sees, itself
    and those before it (PaLM's 12 L H Q T counts those after it too; Megatron-LM's num_floating_point_operations halves
    that as we do). Experts count as far as a token passes through them. num_answered: tokens whose logits, of a critic
    values, are computed, which are those that the loss counts. lora: of adapters beside the layers.
    """
    lengths = list(lengths)
    layers = range(spec.num_layers)
    parameters = active_parameters_of(spec, layers) + active_adapters_of(spec, layers, lora)
    return 2 * parameters * sum(lengths) + attention_flops(spec, lengths) + _head_flops(spec, num_answered)


def training_flops(spec: ModelSpec, lengths: Iterable[int], num_answered: int, lora: LoraSettings | None = None) -> int:
    """Count the operations of forward and backward, in the way of `forward_flops`. With LoRA the gradients of the
    weights are left out, which are frozen, also the head's; those of the adapters are there."""
    lengths = list(lengths)
    flops = TRAINING_PASSES * forward_flops(spec, lengths, num_answered, lora)
    if lora is None:
        return flops
    frozen = 2 * active_parameters_of(spec, range(spec.num_layers)) * sum(lengths)
    return flops - frozen - _head_flops(spec, num_answered)


def _head_flops(spec: ModelSpec, num_answered: int) -> int:
    return 2 * spec.hidden_size * (1 if spec.value_head else spec.vocab_size) * num_answered


def active_adapters_of(spec: ModelSpec, layers: Sequence[int], lora: LoraSettings | None) -> int:
    """Count the parameters of the adapters that a token goes through in these layers, numbered from 0."""
    if lora is None:
        return 0
    shared, expert = adapter_parameters(spec, lora, layers)
    return shared + (expert * spec.moe.experts_per_token if spec.moe is not None else 0)


def active_parameters_of(spec: ModelSpec, layers: Sequence[int]) -> int:
    """Count the parameters of the products that a token goes through in these layers, numbered from 0."""
    numbers = Counter(spec.has_experts(layer) for layer in layers)
    first = {spec.has_experts(layer): layer for layer in reversed(layers)}
    return sum(number * product_weights(spec, first[kind]) for kind, number in numbers.items())


def attention_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """Count those of them that attention takes: queries with keys, weights with values. In layers with a window a token
    sees no more keys than that."""
    lengths = list(lengths)
    pairs = (spec.num_layers - spec.num_local_layers) * sum(length * (length + 1) // 2 for length in lengths)
    if spec.windows is not None:
        seen = [min(length, spec.windows.size) for length in lengths]
        outside = sum((length - width) * width for length, width in zip(lengths, seen, strict=True))
        pairs += spec.num_local_layers * (sum(width * (width + 1) // 2 for width in seen) + outside)
    return 2 * spec.num_heads * (spec.head_dim + spec.value_dim) * pairs

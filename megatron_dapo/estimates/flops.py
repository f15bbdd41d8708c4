"""Floating-point operations of a model by the papers' count: runs stay comparable by MFU."""

from collections.abc import Iterable, Sequence

from megatron_dapo.estimates.memory import adapter_parameters
from megatron_dapo.estimates.pipeline import kinds_of
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import product_weights

TRAINING_PASSES = 3
"""Forward, and a backward of twice its products.

Recomputation does not count (PaLM, arXiv 2204.02311, appendix B: model FLOPs, not hardware FLOPs).
"""


def forward_flops(spec: ModelSpec, lengths: Iterable[int], num_answered: int, lora: LoraSettings | None = None) -> int:
    """Count the operations of one pass over samples of these lengths, packed or not.

    Padding does not count. Two operations per parameter of a product and token. Causal attention
    counts the keys before a token and its own. PaLM's 12 L H Q T includes the later ones;
    Megatron-LM's num_floating_point_operations halves it too. Only a token's own experts count.

    num_answered: tokens in the loss; only they get logits, or values from a critic.
    lora: adapters beside the layers.
    """
    lengths = list(lengths)
    layers = range(spec.num_layers)
    parameters = active_parameters_of(spec, layers) + active_adapters_of(spec, layers, lora)
    return 2 * parameters * sum(lengths) + attention_flops(spec, lengths) + _head_flops(spec, num_answered)


def training_flops(spec: ModelSpec, lengths: Iterable[int], num_answered: int, lora: LoraSettings | None = None) -> int:
    """Count the operations of forward and backward, by the rules of `forward_flops`.

    With LoRA the weights, head included, are frozen and get no gradients; the adapters get theirs.
    """
    lengths = list(lengths)
    flops = TRAINING_PASSES * forward_flops(spec, lengths, num_answered, lora)
    if lora is None:
        return flops
    frozen = 2 * active_parameters_of(spec, range(spec.num_layers)) * sum(lengths)
    return flops - frozen - _head_flops(spec, num_answered)


def _head_flops(spec: ModelSpec, num_answered: int) -> int:
    return 2 * spec.hidden_size * (1 if spec.value_head else spec.vocab_size) * num_answered


def active_adapters_of(spec: ModelSpec, layers: Sequence[int], lora: LoraSettings | None) -> int:
    """Count a token's adapter parameters in these layers, numbered from 0."""
    if lora is None:
        return 0
    shared, expert = adapter_parameters(spec, lora, layers)
    return shared + (expert * spec.moe.experts_per_token if spec.moe is not None else 0)


def active_parameters_of(spec: ModelSpec, layers: Sequence[int]) -> int:
    """Count a token's product parameters in these layers, numbered from 0."""
    return sum(number * product_weights(spec, layer) for layer, number in kinds_of(spec, layers).items())


def attention_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """Count the operations of attention: queries with keys, weights with values. In layers with a
    window a token sees at most a window of keys. A delta net counts here, too."""
    lengths = list(lengths)
    pairs = (spec.num_attention_layers - spec.num_local_layers) * sum(length * (length + 1) // 2 for length in lengths)
    if spec.windows is not None:
        seen = [min(length, spec.windows.size) for length in lengths]
        outside = sum((length - width) * width for length, width in zip(lengths, seen, strict=True))
        pairs += spec.num_local_layers * (sum(width * (width + 1) // 2 for width in seen) + outside)
    return 2 * spec.num_heads * (spec.head_dim + spec.value_dim) * pairs + _delta_flops(spec) * sum(lengths)


def _delta_flops(spec: ModelSpec) -> int:
    """Count a token's operations in the delta nets without their products by weights: of each value
    head the error of the state's value, its update and a query; the convolution."""
    if (net := spec.delta_net) is None:
        return 0
    per_layer = 6 * net.num_value_heads * net.key_dim * net.value_dim + 2 * net.conv_size * net.conv_channels
    return (spec.num_layers - spec.num_attention_layers) * per_layer

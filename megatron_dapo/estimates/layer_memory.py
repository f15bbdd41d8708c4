"""Bytes per token that a layer keeps for backward (arXiv 2205.05198, section 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.huggingface.model_spec import ModelSpec

CHUNK = 64
"""Tokens of a delta net's chunk."""
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class KeptPerToken:
    """Bytes per token, the mean over some layers."""

    attention: float  # attention or delta net, without its core
    core: float  # left out with core_attn in recompute_modules
    mlp: float
    rest: float  # norms and the inputs of the two blocks

    @property
    def total(self) -> float:
        return self.attention + self.core + self.mlp + self.rest


def kept_per_token(spec: ModelSpec, sizes: ParallelSizes, width: int, part: int, layers: Sequence[int]) -> KeptPerToken:
    """Return the bytes per token one of these layers, numbered from 0, keeps for backward.

    width: bytes of a number. part: ranks to share a sequence. Without layers: of the first.
    """
    layers = layers or range(1)
    share = sum(map(spec.has_attention, layers)) / len(layers)
    attention, core = (share * num_bytes for num_bytes in _attention(spec, sizes, width, part))
    if spec.delta_net is not None:
        of_net, core_of_net = _delta_net(spec, sizes, width)
        attention += (1 - share) * of_net
        core += (1 - share) * core_of_net
    share = sum(map(spec.has_experts, layers)) / len(layers)
    mlp = (1 - share) * 4 * spec.dense_ffn_size * width / sizes.tp  # gate, up, silu(gate), product
    if spec.moe is not None:  # tokens spread evenly; one copy per expert and part of it
        # gate, up, silu(gate), product; with a limit: both clamped, sigmoid, product by weights
        widths = 4 if spec.glu_limit is None else 8
        experts = spec.moe.experts_per_token * (widths * spec.ffn_size + sizes.etp * spec.hidden_size) * width / part
        mlp += share * (experts + 4 * spec.moe.shared_ffn_size * width / sizes.tp)
    # each norm: float32 input, normed output, the product's input (output norm: the next input)
    rest = (4 if spec.output_norms else 2) * spec.hidden_size * (4 + 2 * width) / part
    return KeptPerToken(attention, core, mlp, rest)


def _attention(spec: ModelSpec, sizes: ParallelSizes, width: int, part: int) -> tuple[float, float]:
    """Return the bytes of a layer's attention: (without its core, of the core)."""
    heads = spec.num_heads + spec.num_kv_heads
    # q, k, v as they came; q and k rotated; the output, the size of q
    attention = 3 * heads * spec.head_dim * width / sizes.tp
    core = attention / 3
    if spec.latent is not None:  # keys and values as they came; inputs and outputs of norms
        attention += spec.num_heads * (spec.latent.plain_dim + spec.value_dim) * width / sizes.tp
        attention += spec.latent.down_width * (4 + 2 * width) / part
        core = attention / 3
    if spec.attention_output_gate:  # as it came, its sigmoid, the product
        attention += 3 * spec.num_heads * spec.head_dim * width / sizes.tp
    return attention - core, core


def _delta_net(spec: ModelSpec, sizes: ParallelSizes, width: int) -> tuple[float, float]:
    """Return the bytes of a layer's delta net: (without its core, of the core).

    The core is convolution and rule: the product's rows before and after the convolution, and of a
    head the decay, beta and a row of the chunk's matrix. Float32 is a CPU's, in torch: four rows,
    and keys and values eleven times, as measured.
    """
    net = spec.delta_net
    assert net is not None, "the layer has a delta net"
    values = net.num_value_heads * net.value_dim
    # the whole product; what was read, and the norm's output; the norm in float32: its input and
    # output, the gate and its silu, the product
    others = (net.conv_channels + 3 * values + 2 * net.num_value_heads) * width + 5 * values * _FLOAT
    in_torch = 4 * CHUNK + 11 * (net.key_dim + net.value_dim)
    per_head = in_torch * _FLOAT if width == _FLOAT else CHUNK * width + 2 * _FLOAT
    core = 2 * net.conv_channels * width + net.num_value_heads * per_head
    return others / sizes.tp, core / sizes.tp

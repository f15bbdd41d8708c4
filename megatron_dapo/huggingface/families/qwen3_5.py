"""Qwen3.5 and Qwen3.6, the models of text alone: dense, or with a mixture of experts."""

from dataclasses import replace
from typing import Any

from megatron_dapo.huggingface.experts import SHARED_EXPERT
from megatron_dapo.huggingface.family import DENSE, MIXTURE, Family, NeutralValues
from megatron_dapo.huggingface.model_spec import DeltaNet, ModelSpec
from megatron_dapo.huggingface.weight_rows import (
    ATTENTION,
    DECODER,
    HF_LAYER,
    LAYER,
    Row,
    Shapes,
    changed,
    has_shared_experts,
    mlp_rows,
    moe,
)

HF_DELTA = HF_LAYER + "linear_attn."
A_LOG = "linear_attn.A_log"


def _is_quarter(rope: object) -> bool:
    return not isinstance(rope, dict) or rope.get("partial_rotary_factor") in (None, 0.25)


# SGLang reads the rotated share from one place, transformers from another. transformers always has
# the gate of the attention, and SiLU in the gate of a delta net. Multi-token prediction and
# positions of images (mrope) have no effect on text.
_HYBRID: NeutralValues = {
    "partial_rotary_factor": lambda value: value == 0.25,
    "rope_parameters": _is_quarter,
    "rope_scaling": _is_quarter,
    "attn_output_gate": lambda value: value is True,
    "output_gate_type": lambda value: value in (None, "silu", "swish"),
    "is_causal": lambda value: value is True,
}


def hybrid(neutral: NeutralValues) -> NeutralValues:
    """Return the neutral values of a hybrid from those of a plain decoder, dense or a mixture."""
    kept = {key: rule for key, rule in neutral.items() if key not in ("layer_types", SHARED_EXPERT)}
    return {**kept, **_HYBRID}


def delta(m: ModelSpec) -> DeltaNet:
    """Return the sizes of a model's delta nets."""
    assert m.delta_net is not None, "the row is of a gated delta net"
    return m.delta_net


def _keys(m: ModelSpec) -> int:
    return delta(m).num_key_heads * delta(m).key_dim


def values(m: ModelSpec) -> int:
    """Return the rows of the values of a delta net."""
    return delta(m).num_value_heads * delta(m).value_dim


def _sections(m: ModelSpec) -> tuple[int, ...]:
    """Return the rows of queries, keys and values, each cut by itself."""
    return _keys(m), _keys(m), values(m)


def delta_row(megatron: str, hf: tuple[str, ...], transform: str, shapes: Shapes, **more: Any) -> Row:
    """Return a row of a delta net, cut by heads. hf: last words of the tensors' names."""
    names = tuple(HF_DELTA + name for name in hf)
    more = {"cut": 0} | more
    return Row(ATTENTION + megatron, names, transform, shapes, in_layer=lambda m, n: not m.has_attention(n), **more)


def _per_head(name: str, served_types: tuple[str, ...] = ()) -> Row:
    """Return the row of a number per value head."""
    return delta_row(
        name, (name,), "same", lambda m: [(delta(m).num_value_heads,)], served_types=lambda m: served_types
    )  # fmt: skip


INPUTS = delta_row(
    "linear_in.weight",
    ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"),
    "delta_inputs",
    lambda m: [
        (rows, m.hidden_size)
        for rows in (delta(m).conv_channels, values(m), delta(m).num_value_heads, delta(m).num_value_heads)
    ],
    blocks=lambda m: [_sections(m), (), (), ()],
    served_as=tuple(
        HF_DELTA + name + ".weight" for name in ("in_proj_qkvz", "in_proj_qkvz", "in_proj_ba", "in_proj_ba")
    ),
    unquantized=("in_proj_b", "in_proj_a"),
)
"""The product of the hidden states: query, key, value, gate (z), and two numbers per value head."""


def _served(row: Row) -> Row:
    """Return a row with SGLang's names, whose layers have attention's parameters themselves."""
    if not row.megatron.startswith(ATTENTION):
        return row
    name = row.served_as or row.hf[0]
    assert isinstance(name, str), "attention's row is one parameter of a server"
    return replace(row, served_as=name.replace(".self_attn.", "."))


ROWS = changed(
    tuple(map(_served, DECODER)),
    INPUTS,
    delta_row(
        "conv_weight", ("conv1d.weight",), "delta_conv",
        lambda m: [(delta(m).conv_channels, 1, delta(m).conv_size)], blocks=lambda m: [_sections(m)],
    ),
    _per_head("A_log", served_types=("float32",)),
    _per_head("dt_bias"),
    delta_row("out_norm.weight", ("norm.weight",), "same", lambda m: [(delta(m).value_dim,)], cut=None),
    delta_row("linear_out.weight", ("out_proj.weight",), "same", lambda m: [(m.hidden_size, values(m))], cut=1),
)  # fmt: skip
"""The rows of a dense hybrid."""

MIXTURE_ROWS = changed(
    ROWS,
    *mlp_rows(
        "mlp.shared_experts.", "mlp.shared_expert.", lambda m: moe(m).shared_ffn_size, ModelSpec.has_experts,
        where=has_shared_experts,
    ),
    Row(
        LAYER + "mlp.shared_experts.gate_weight", (HF_LAYER + "mlp.shared_expert_gate.weight",), "same",
        lambda m: [(1, m.hidden_size)], in_layer=ModelSpec.has_experts,
    ),
)  # fmt: skip
"""The rows of a hybrid with experts."""

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    server_class="sglang.srt.models.qwen3_5_text:Qwen3_5ForCausalLM",
    tool_parser="qwen3_coder",
    reasoning_parser="qwen3",
    neutral=hybrid(DENSE),
    defaults={"partial_rotary_factor": 0.25},
    required=("head_dim", "num_key_value_heads"),
    rows=ROWS,
    qk_norm=True,
    has_delta_net=True,
    partial_rotary=True,
    needs_rope=True,
    spec_fields=lambda hf: {"zero_centered_norms": True, "attention_output_gate": True},
)
MIXTURE_FAMILY = replace(
    FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    server_class="sglang.srt.models.qwen3_5_text:Qwen3_5MoeForCausalLM",
    # transformers divides the weights of a token's experts by their sum, whatever config.json says
    neutral={
        **hybrid(MIXTURE),
        "norm_topk_prob": lambda value: value is True,
        SHARED_EXPERT: lambda value: value != 0,
    },
    defaults={**FAMILY.defaults, "norm_topk_prob": True},
    required=(*FAMILY.required, SHARED_EXPERT),
    rows=MIXTURE_ROWS,
    ffn_key="moe_intermediate_size",
    is_moe=True,
)

"""One row per Megatron parameter: its Hugging Face tensors, their cut, a server's form of them.

Plain data: `models/weight_map.py` applies the rows to parameters, `model_tensors.py` lists a
model's tensors by them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.model_spec import ModelSpec

Shapes = Callable[[ModelSpec], list[tuple[int, ...]]]
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# as in Hugging Face's token classification with one label
VALUE_HEAD = ("score.weight", "score.bias")
HF_LAYER = "model.layers.{l}."
HF_ATTENTION = HF_LAYER + "self_attn."
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
LAYER = "decoder.layers.{l}."
ATTENTION = LAYER + "self_attention."
EXPERT = LAYER + "mlp.experts.local_experts.{e}."
ALL_EXPERTS = LAYER + "mlp.experts."
ROUTER = LAYER + "mlp.router."


@dataclass(frozen=True)
class Row:
    """A Megatron parameter and its Hugging Face tensors.

    In names `{l}` stands for the layer and `{e}` for the expert. A Megatron name counts experts on
    a rank, a Hugging Face name in the model.
    """

    megatron: str
    """Name of the parameter inside a chunk."""

    hf: tuple[str, ...]
    """Names of the Hugging Face tensors, in the order of `shapes`."""

    transform: str
    """Key of models/weight_map.py: TRANSFORMS. Joins slices of the tensors into a rank's shard."""

    shapes: Shapes
    """Shapes of the tensors; of a stack, those of one expert."""

    cut: int | None = None
    """Axis of slices on tensor-parallel ranks of trainer and server; None if all hold all."""

    blocks: Shapes | None = None
    """Per tensor, heights of its blocks, one below the other, each cut by itself; None for none."""

    unit: Callable[[ModelSpec], int] = lambda m: 1
    """Rows kept together by a cut. Server ranks in excess of a tensor's units repeat them."""

    alias: str | None = None
    """Megatron name with Transformer Engine's fusion: of norm and product, or of all experts."""

    is_stacked: bool = False
    """Whether a tensor is a stack of all experts' tensors of a layer."""

    served_as: str | tuple[str, ...] | None = None
    """Name of the server's parameter with all of the tensors; None if each has its own name.

    Several names: one per tensor.
    """

    served_types: Callable[[ModelSpec], tuple[str, ...]] = lambda m: ()
    """A server's types for them, the usual one first; () for the trainer's type."""

    served_once: bool = False
    """Whether the first rank of a server holds them whole and the others hold zeros."""

    sent_together: bool = False
    """Whether a server drops a tensor sent in another call than the others."""

    unquantized: tuple[str, ...] = ()
    """Last names of the modules that a server with FP8 weights holds as it does without."""

    where: Callable[[ModelSpec], bool] = lambda m: True
    """Condition on the model."""

    in_layer: Callable[[ModelSpec, int], bool] = lambda m, layer: True
    """Condition on the layer, counted from 0."""

    @property
    def of_experts(self) -> bool:
        """Return whether each expert has such a parameter."""
        return "{e}" in self.megatron

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the last names of the Hugging Face modules, for a layer's linear modules only."""
        is_linear = ".linear_" in self.megatron and self.megatron.endswith(".weight")
        return tuple(name.split(".")[-2] for name in self.hf) if is_linear and not self.is_stacked else ()

    def in_blocks(self, index: int) -> bool:
        """Return whether a server with FP8 weights holds a tensor of the row in blocks."""
        return bool(self.modules) and self.modules[index] not in self.unquantized


def changed(rows: tuple[Row, ...], *changes: Row) -> tuple[Row, ...]:
    """Return the rows with `changes` in place of the rows of the same Megatron parameters.

    Changes of parameters without a row stand after the last row of a layer.
    """
    by_name = {row.megatron: row for row in changes}
    new = [row for row in changes if all(row.megatron != other.megatron for other in rows)]
    kept = [by_name.get(row.megatron, row) for row in rows]
    end = max(number for number, row in enumerate(rows) if "{l}" in row.megatron) + 1
    return (*kept[:end], *new, *kept[end:])


def norm(megatron: str, hf: str, alias: str | None = None) -> Row:
    """Return the row of a layer's norm of hidden states. megatron, hf: last words of the names."""
    alias = LAYER + alias if alias else None
    return Row(f"{LAYER}{megatron}.weight", (f"{HF_LAYER}{hf}.weight",), "same", norm_shape, alias=alias)


def output_norms(attention: str, mlp: str) -> tuple[Row, Row]:
    """Return the rows of the norms behind a layer's two blocks (`layers.OutputNorm`).

    They norm the blocks' additions to the hidden states.
    """
    return norm("self_attn_bda", attention), norm("mlp_bda", mlp)


def norm_before_mlp(hf: str) -> Row:
    """Return the row of the norm before the MLP."""
    return norm("pre_mlp_layernorm", hf, alias="mlp.linear_fc1.layer_norm_weight")


def norm_shape(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(m.hidden_size,)]


def _head_norm(name: str) -> Row:
    """Return the row of the norm of each head, of queries (q) or keys (k)."""
    return Row(
        f"{ATTENTION}{name}_layernorm.weight", (f"{HF_ATTENTION}{name}_norm.weight",), "same",
        lambda m: [(m.head_dim,)], where=lambda m: m.qk_norm, in_layer=ModelSpec.has_attention,
    )  # fmt: skip


def _vocabulary(megatron: str, hf: str, where: Callable[[ModelSpec], bool]) -> Row:
    return Row(megatron, (hf,), "same", lambda m: [(m.vocab_size, m.hidden_size)], cut=0, where=where)


def _qkv_heights(m: ModelSpec) -> list[tuple[int, ...]]:
    num_queries = m.num_heads * (2 if m.attention_output_gate else 1)  # a head's gate is below its query
    return [(heads * m.head_dim,) for heads in (num_queries, m.num_kv_heads, m.num_kv_heads)]


def _qkv(kind: str, shapes: Shapes, where: Callable[[ModelSpec], bool] = lambda m: True) -> Row:
    """Return the row of query, key and value. kind: weight or bias."""
    return Row(
        f"{ATTENTION}linear_qkv.{kind}", tuple(f"{HF_ATTENTION}{x}_proj.{kind}" for x in "qkv"), "qkv", shapes, cut=0,
        unit=lambda m: m.head_dim, served_as=f"{HF_ATTENTION}qkv_proj.{kind}", where=where,
        in_layer=ModelSpec.has_attention,
    )  # fmt: skip


def mlp_rows(
    megatron: str,
    hf: str,
    width: Callable[[ModelSpec], int],
    in_layer: Callable[[ModelSpec, int], bool],
    where: Callable[[ModelSpec], bool],
) -> list[Row]:
    """Return the rows of a gated MLP. megatron, hf: beginnings of its modules' names."""
    up = Row(
        LAYER + megatron + "linear_fc1.weight",
        (f"{HF_LAYER}{hf}gate_proj.weight", f"{HF_LAYER}{hf}up_proj.weight"),
        "stacked", lambda m: [(width(m), m.hidden_size)] * 2, cut=0, where=where, in_layer=in_layer,
        served_as=f"{HF_LAYER}{hf}gate_up_proj.weight",
    )  # fmt: skip
    down = Row(
        LAYER + megatron + "linear_fc2.weight", (f"{HF_LAYER}{hf}down_proj.weight",), "same",
        lambda m: [(m.hidden_size, width(m))], cut=1, where=where, in_layer=in_layer,
    )  # fmt: skip
    return [up, down]


def _experts() -> list[Row]:
    """Return the rows of a layer's experts, each with tensors of its own."""
    rows = mlp_rows(
        "mlp.experts.local_experts.{e}.", "mlp.experts.{e}.", lambda m: m.ffn_size, ModelSpec.has_experts,
        where=lambda m: m.moe is not None,
    )  # fmt: skip
    served = (f"{HF_LAYER}mlp.experts.w13_weight", f"{HF_LAYER}mlp.experts.w2_weight")
    return [
        replace(row, alias=f"{ALL_EXPERTS}linear_fc{number}.weight{{e}}", served_as=name)
        for number, (row, name) in enumerate(zip(rows, served, strict=True), start=1)
    ]


def moe(m: ModelSpec) -> MoEConfig:
    """Return the mixture of a model with experts."""
    assert m.moe is not None, "the row is of a mixture of experts"
    return m.moe


def router_shape(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(moe(m).num_experts, m.hidden_size)]


def _is_dense(m: ModelSpec, layer: int) -> bool:
    return not m.has_experts(layer)


def has_shared_experts(m: ModelSpec) -> bool:
    return m.moe is not None and m.moe.shared_ffn_size > 0


def _has_router_bias(m: ModelSpec) -> bool:
    return m.moe is not None and m.moe.has_bias


DECODER: tuple[Row, ...] = (
    _vocabulary("embedding.word_embeddings.weight", EMBEDDING, where=lambda m: True),
    norm("input_layernorm", "input_layernorm", alias="self_attention.linear_qkv.layer_norm_weight"),
    _qkv("weight", lambda m: [(*rows, m.hidden_size) for rows in _qkv_heights(m)]),
    _qkv("bias", _qkv_heights, where=lambda m: m.qkv_bias),
    _head_norm("q"),
    _head_norm("k"),
    Row(
        ATTENTION + "linear_proj.weight", (HF_ATTENTION + "o_proj.weight",), "same",
        lambda m: [(m.hidden_size, m.num_heads * m.value_dim)], cut=1, in_layer=ModelSpec.has_attention,
    ),
    norm_before_mlp("post_attention_layernorm"),
    *mlp_rows("mlp.", "mlp.", lambda m: m.dense_ffn_size, _is_dense, where=lambda m: True),
    Row(
        # SGLang holds it in float32 beside a bias
        ROUTER + "weight", (HF_LAYER + "mlp.gate.weight",), "same", router_shape, in_layer=ModelSpec.has_experts,
        served_types=lambda m: ("float32",) if _has_router_bias(m) else (),
    ),
    Row(
        ROUTER + "expert_bias", (HF_LAYER + ROUTER_BIAS,), "same", lambda m: [(moe(m).num_experts,)],
        where=_has_router_bias, in_layer=ModelSpec.has_experts,
    ),
    *_experts(),
    *mlp_rows(
        "mlp.shared_experts.", "mlp.shared_experts.", lambda m: moe(m).shared_ffn_size, ModelSpec.has_experts,
        where=has_shared_experts,
    ),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), "same", norm_shape),
    Row("output_layer.weight", VALUE_HEAD[:1], "same", lambda m: [(1, m.hidden_size)], where=lambda m: m.value_head),
    Row("output_layer.bias", VALUE_HEAD[1:], "same", lambda m: [(1,)], where=lambda m: m.value_head),
    _vocabulary("output_layer.weight", LM_HEAD, where=lambda m: not (m.tied_embeddings or m.value_head)),
    # tied, and the pipeline has several stages: the last one holds a copy of the embedding
    _vocabulary("output_layer.weight", EMBEDDING, where=lambda m: m.tied_embeddings),
)  # fmt: skip
"""Rows of the plain decoder, dense or with experts."""

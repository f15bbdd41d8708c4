"""One table per model family: which Hugging Face tensors a Megatron parameter is made of, and how it is cut.

Loading a checkpoint, exporting one and sending weights to the servers all go through this table and nothing else.

A row's transform knows three things: along which axis tensor-parallel ranks hold slices of the HF tensors (`dim`; None:
everybody holds all), how a rank's slices are joined into its Megatron shard, and how the shard is split into them.
So a full HF tensor is always the concatenation of the ranks' slices along `dim`, block by block where it has several
(`Transform.whole`). Of an expert they are the expert-tensor-parallel ranks; other expert-parallel ranks do not have it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.model_spec import ModelSpec


@dataclass(frozen=True)
class Transform:
    """How slices of Hugging Face tensors make a Megatron shard.

    dim: axis of the cut. join: slices of the HF tensors, in row order -> Megatron shard. split: the inverse. blocks:
    several tensors of one size stand in an HF tensor one below the other; a rank's slice has its slice of each.
    sent_together: a server drops one of the HF tensors that comes in another call than the others.
    """

    dim: int | None
    join: Callable[[list[Tensor], ModelSpec], Tensor]
    split: Callable[[Tensor, ModelSpec], list[Tensor]]
    blocks: int = 1
    sent_together: bool = False

    def whole(self, slices: list[Tensor]) -> Tensor:
        """Return the HF tensor that the ranks, in their order, hold these slices of."""
        assert self.dim is not None, "what is not cut has no slices"
        if self.blocks == 1:
            return torch.cat(slices, dim=self.dim)
        of_ranks = [part.chunk(self.blocks) for part in slices]
        return torch.cat([part for block in zip(*of_ranks, strict=True) for part in block])


def _join_qkv(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put q, k, v rows into Megatron's order: [group][q heads of the group, k, v][head_dim] rows.

    The rows of a head of q and k are put such that the two halves of the rotated ones are the two coordinates of each
    pair, in all families. Products of q and k do not depend on the order of the dimensions.
    """
    q, k, v = (part.unflatten(0, (-1, spec.head_dim)) for part in parts)
    if spec.rotary_interleaved:
        order = _halves(spec)
        q, k = q[:, order], k[:, order]
    q = q.unflatten(0, (k.size(0), -1))
    return torch.cat([q, k[:, None], v[:, None]], dim=1).flatten(0, 2)


def _split_qkv(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    heads_per_group = spec.num_heads // spec.num_kv_heads
    grouped = shard.unflatten(0, (-1, heads_per_group + 2, spec.head_dim))
    q, k, v = grouped.split([heads_per_group, 1, 1], dim=1)
    if spec.rotary_interleaved:
        order = torch.tensor(_halves(spec)).argsort()
        q, k = q[:, :, order], k[:, :, order]
    return [part.flatten(0, 2) for part in (q, k, v)]


def _halves(spec: ModelSpec) -> list[int]:
    """Return the places in a checkpoint of a head's rows in Megatron's order, where rotated pairs are neighbours."""
    return [*_rotated_order(spec), *range(spec.rotary_dim, spec.head_dim)]


def _join_latent_queries(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put the rotated dimensions of each head, which are its last in a checkpoint, first, as `_join_qkv` has them."""
    return parts[0].unflatten(0, (-1, spec.head_dim))[:, _rotated_first(spec)].flatten(0, 1)


def _split_latent_queries(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    order = torch.tensor(_rotated_first(spec)).argsort()
    return [shard.unflatten(0, (-1, spec.head_dim))[:, order].flatten(0, 1)]


def _rotated_first(spec: ModelSpec) -> list[int]:
    """Return the places in a checkpoint of a head's rows in Megatron's order."""
    start = spec.head_dim - spec.rotary_dim
    return [*(start + place for place in _rotated_order(spec)), *range(start)]


def _join_latent(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put the rows of the latent vectors and of the rotated keys, which come last, one below the other."""
    *queries, keys = parts
    latent, rotated = keys.tensor_split([keys.size(0) - spec.rotary_dim])
    return torch.cat([*queries, latent, rotated[_rotated_order(spec)]])


def _split_latent(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    assert spec.latent is not None
    queries, keys = shard.tensor_split([spec.latent.q_rank or 0])
    latent, rotated = keys.tensor_split([spec.latent.kv_rank])
    keys = torch.cat([latent, rotated[torch.tensor(_rotated_order(spec)).argsort()]])
    return [queries, keys] if spec.latent.q_rank else [keys]


def _rotated_order(spec: ModelSpec) -> list[int]:
    """Return the places in a checkpoint of the rotated rows in Megatron's order, which has both halves of the pairs."""
    rotated = range(spec.rotary_dim)
    return [*rotated[::2], *rotated[1::2]] if spec.rotary_interleaved else list(rotated)


REPLICATED = Transform(None, lambda parts, spec: parts[0], lambda shard, spec: [shard])
ROWS = Transform(0, REPLICATED.join, REPLICATED.split)
COLUMNS = Transform(1, REPLICATED.join, REPLICATED.split)
QKV = Transform(0, _join_qkv, _split_qkv)
GATE_UP = Transform(0, lambda parts, spec: torch.cat(parts), lambda shard, spec: list(shard.chunk(2)))
LATENT_QUERIES = Transform(0, _join_latent_queries, _split_latent_queries)
LATENT = Transform(None, _join_latent, _split_latent, sent_together=True)
FUSED_GATE_UP = Transform(0, REPLICATED.join, REPLICATED.split, blocks=2)  # one HF tensor, as in Megatron


Shapes = Callable[[ModelSpec], list[tuple[int, ...]]]


@dataclass(frozen=True)
class Row:
    """A Megatron parameter and its Hugging Face tensors.

    megatron: parameter name inside a chunk; alias: its name where Transformer Engine fuses the norm into the linear
    layer, or all experts into one module. `{l}` stands for the layer, `{e}` for the expert: in a Megatron name counted
    on its rank, in a Hugging Face name in the model. shapes: of the HF tensors, in their order. is_stacked: an HF
    tensor is a stack of those of all experts of a layer; shapes and transform are of one expert's. where: a condition
    on the model; in_layer: on a layer of it, counted from 0.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Transform
    shapes: Shapes
    alias: str | None = None
    is_stacked: bool = False
    where: Callable[[ModelSpec], bool] = lambda spec: True
    in_layer: Callable[[ModelSpec, int], bool] = lambda spec, layer: True


_HF_LAYER = "model.layers.{l}."
_QKV = tuple(f"{_HF_LAYER}self_attn.{x}_proj" for x in "qkv")
_HF_EXPERT = _HF_LAYER + "mlp.experts.{e}."
_SHARED = "mlp.shared_experts."
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
ADAPTERS = "adapters."  # what names of adapters begin with, which have no row: models/lora.py
VALUE_HEAD = ("score.weight", "score.bias")  # as in Hugging Face's token classification with one label


def _norm(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(m.hidden_size,)]


def _head_norm(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(m.head_dim,)]


def _vocabulary(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(m.vocab_size, m.hidden_size)]


def _qkv_bias(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(heads * m.head_dim,) for heads in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]


def _qkv(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(*rows, m.hidden_size) for rows in _qkv_bias(m)]


def _moe(m: ModelSpec) -> MoEConfig:
    assert m.moe is not None, "the row is of a mixture of experts"
    return m.moe


def _gate_up(width: Callable[[ModelSpec], int]) -> Shapes:
    return lambda m: [(width(m), m.hidden_size)] * 2


def _down(width: Callable[[ModelSpec], int]) -> Shapes:
    return lambda m: [(m.hidden_size, width(m))]


def _dense_width(m: ModelSpec) -> int:
    return m.dense_ffn_size


def _expert_width(m: ModelSpec) -> int:
    return m.ffn_size


def _shared_width(m: ModelSpec) -> int:
    return _moe(m).shared_ffn_size


def _router(m: ModelSpec) -> list[tuple[int, ...]]:
    return [(_moe(m).num_experts, m.hidden_size)]


def _is_dense(m: ModelSpec, layer: int) -> bool:
    return not m.has_experts(layer)


def _has_shared_experts(m: ModelSpec) -> bool:
    return m.moe is not None and m.moe.shared_ffn_size > 0


# fmt: off
DECODER = (
    Row("embedding.word_embeddings.weight", (EMBEDDING,), ROWS, _vocabulary),
    Row("decoder.layers.{l}.input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",), REPLICATED, _norm,
        alias="decoder.layers.{l}.self_attention.linear_qkv.layer_norm_weight"),
    Row("decoder.layers.{l}.self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), QKV, _qkv),
    Row("decoder.layers.{l}.self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), QKV, _qkv_bias,
        where=lambda m: m.qkv_bias),
    Row("decoder.layers.{l}.self_attention.q_layernorm.weight", (_HF_LAYER + "self_attn.q_norm.weight",), REPLICATED,
        _head_norm, where=lambda m: m.qk_norm),
    Row("decoder.layers.{l}.self_attention.k_layernorm.weight", (_HF_LAYER + "self_attn.k_norm.weight",), REPLICATED,
        _head_norm, where=lambda m: m.qk_norm),
    Row("decoder.layers.{l}.self_attention.linear_proj.weight", (_HF_LAYER + "self_attn.o_proj.weight",), COLUMNS,
        lambda m: [(m.hidden_size, m.num_heads * m.value_dim)]),
    Row("decoder.layers.{l}.pre_mlp_layernorm.weight", (_HF_LAYER + "post_attention_layernorm.weight",), REPLICATED,
        _norm, alias="decoder.layers.{l}.mlp.linear_fc1.layer_norm_weight"),
    Row("decoder.layers.{l}.mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"), GATE_UP,
        _gate_up(_dense_width), in_layer=_is_dense),
    Row("decoder.layers.{l}.mlp.linear_fc2.weight", (_HF_LAYER + "mlp.down_proj.weight",), COLUMNS,
        _down(_dense_width), in_layer=_is_dense),
    Row("decoder.layers.{l}.mlp.router.weight", (_HF_LAYER + "mlp.gate.weight",), REPLICATED,
        _router, in_layer=ModelSpec.has_experts),
    Row("decoder.layers.{l}.mlp.router.expert_bias", (_HF_LAYER + ROUTER_BIAS,), REPLICATED,
        lambda m: [(_moe(m).num_experts,)], where=lambda m: m.moe is not None and m.moe.has_bias,
        in_layer=ModelSpec.has_experts),
    Row("decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc1.weight",
        (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"), GATE_UP, _gate_up(_expert_width),
        in_layer=ModelSpec.has_experts, alias="decoder.layers.{l}.mlp.experts.linear_fc1.weight{e}"),
    Row("decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc2.weight", (_HF_EXPERT + "down_proj.weight",),
        COLUMNS, _down(_expert_width), in_layer=ModelSpec.has_experts,
        alias="decoder.layers.{l}.mlp.experts.linear_fc2.weight{e}"),
    Row("decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight",
        (_HF_LAYER + _SHARED + "gate_proj.weight", _HF_LAYER + _SHARED + "up_proj.weight"), GATE_UP,
        _gate_up(_shared_width), where=_has_shared_experts, in_layer=ModelSpec.has_experts),
    Row("decoder.layers.{l}.mlp.shared_experts.linear_fc2.weight", (_HF_LAYER + _SHARED + "down_proj.weight",),
        COLUMNS, _down(_shared_width), where=_has_shared_experts, in_layer=ModelSpec.has_experts),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED, _norm),
    Row("output_layer.weight", VALUE_HEAD[:1], REPLICATED, lambda m: [(1, m.hidden_size)],
        where=lambda m: m.value_head),
    Row("output_layer.bias", VALUE_HEAD[1:], REPLICATED, lambda m: [(1,)], where=lambda m: m.value_head),
    Row("output_layer.weight", (LM_HEAD,), ROWS, _vocabulary,
        where=lambda m: not (m.tied_embeddings or m.value_head)),
    # tied, and the pipeline has several stages: the last one holds a copy of the embedding
    Row("output_layer.weight", (EMBEDDING,), ROWS, _vocabulary, where=lambda m: m.tied_embeddings),
)
# fmt: on


def _changed(rows: tuple[Row, ...], *changes: Row) -> tuple[Row, ...]:
    """Return the rows with those of `changes` in the place of the row for the same Megatron parameter; those for a
    parameter that has none stand behind the last row of a layer."""
    by_name = {row.megatron: row for row in changes}
    new = [row for row in changes if all(row.megatron != other.megatron for other in rows)]
    kept = [by_name.get(row.megatron, row) for row in rows]
    end = max(number for number, row in enumerate(rows) if "{l}" in row.megatron) + 1
    return (*kept[:end], *new, *kept[end:])


def _output_norms(attention: str, mlp: str) -> tuple[Row, Row]:
    """Return the rows of the norms of what a layer's two blocks add to the hidden states (`layers.OutputNorm`)."""
    return (
        Row("decoder.layers.{l}.self_attn_bda.weight", (f"{_HF_LAYER}{attention}.weight",), REPLICATED, _norm),
        Row("decoder.layers.{l}.mlp_bda.weight", (f"{_HF_LAYER}{mlp}.weight",), REPLICATED, _norm),
    )


GLM4 = _changed(
    DECODER,
    Row("decoder.layers.{l}.mlp.linear_fc1.weight", (_HF_LAYER + "mlp.gate_up_proj.weight",), FUSED_GATE_UP,
        lambda m: [(2 * m.ffn_size, m.hidden_size)]),
    *_output_norms("post_self_attn_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
GEMMA3 = _changed(
    DECODER,
    Row("decoder.layers.{l}.pre_mlp_layernorm.weight", (_HF_LAYER + "pre_feedforward_layernorm.weight",), REPLICATED,
        _norm, alias="decoder.layers.{l}.mlp.linear_fc1.layer_norm_weight"),
    *_output_norms("post_attention_layernorm", "post_feedforward_layernorm"),
)  # fmt: skip


def _latent(m: ModelSpec) -> LatentAttention:
    assert m.latent is not None, "the row is of a latent attention"
    return m.latent


def _has_latent_queries(m: ModelSpec) -> bool:
    return m.latent is not None and m.latent.q_rank is not None


def _down_keys(m: ModelSpec) -> tuple[int, ...]:
    return _latent(m).kv_rank + m.rotary_dim, m.hidden_size


_ATTENTION = "decoder.layers.{l}.self_attention."
_HF_ATTENTION = _HF_LAYER + "self_attn."
DEEPSEEK = _changed(
    tuple(row for row in DECODER if ".linear_qkv." not in row.megatron),
    Row(_ATTENTION + "linear_down.weight",
        (_HF_ATTENTION + "q_a_proj.weight", _HF_ATTENTION + "kv_a_proj_with_mqa.weight"), LATENT,
        lambda m: [(_latent(m).q_rank or 0, m.hidden_size), _down_keys(m)], where=_has_latent_queries),
    Row(_ATTENTION + "linear_down.weight", (_HF_ATTENTION + "kv_a_proj_with_mqa.weight",), LATENT,
        lambda m: [_down_keys(m)], where=lambda m: not _has_latent_queries(m)),
    Row(_ATTENTION + "q_layernorm.weight", (_HF_ATTENTION + "q_a_layernorm.weight",), REPLICATED,
        lambda m: [(_latent(m).q_rank or 0,)], where=_has_latent_queries),
    Row(_ATTENTION + "kv_layernorm.weight", (_HF_ATTENTION + "kv_a_layernorm.weight",), REPLICATED,
        lambda m: [(_latent(m).kv_rank,)]),
    Row(_ATTENTION + "linear_q.weight", (_HF_ATTENTION + "q_b_proj.weight",), LATENT_QUERIES,
        lambda m: [(m.num_heads * m.head_dim, _latent(m).q_rank or 0)], where=_has_latent_queries),
    Row(_ATTENTION + "linear_q.weight", (_HF_ATTENTION + "q_proj.weight",), LATENT_QUERIES,
        lambda m: [(m.num_heads * m.head_dim, m.hidden_size)], where=lambda m: not _has_latent_queries(m)),
    Row(_ATTENTION + "linear_kv.weight", (_HF_ATTENTION + "kv_b_proj.weight",), ROWS,
        lambda m: [(m.num_heads * (_latent(m).plain_dim + m.value_dim), _latent(m).kv_rank)]),
)  # fmt: skip


def _join_interleaved(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put the columns of gate and up, which alternate, one below the other as rows; of biases, the numbers."""
    columns = parts[0].t() if parts[0].dim() > 1 else parts[0]
    return torch.cat([columns[::2], columns[1::2]])


def _split_interleaved(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    columns = torch.stack(shard.chunk(2), dim=1).flatten(0, 1)
    return [columns.t().contiguous() if columns.dim() > 1 else columns]


INTERLEAVED = Transform(None, _join_interleaved, _split_interleaved)
TRANSPOSED = Transform(None, lambda parts, spec: parts[0].t(), lambda shard, spec: [shard.t().contiguous()])
_STACKED = _HF_LAYER + "mlp.experts."
_EXPERT_FC = "decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc"
_GROUPED_FC = "decoder.layers.{l}.mlp.experts.linear_fc"
GPT_OSS = _changed(
    DECODER,
    Row(_EXPERT_FC + "1.weight", (_STACKED + "gate_up_proj",), INTERLEAVED, lambda m: [(m.hidden_size, 2 * m.ffn_size)],
        alias=_GROUPED_FC + "1.weight{e}", is_stacked=True),
    Row(_EXPERT_FC + "1.bias", (_STACKED + "gate_up_proj_bias",), INTERLEAVED, lambda m: [(2 * m.ffn_size,)],
        alias=_GROUPED_FC + "1.bias{e}", is_stacked=True),
    Row(_EXPERT_FC + "2.weight", (_STACKED + "down_proj",), TRANSPOSED, lambda m: [(m.ffn_size, m.hidden_size)],
        alias=_GROUPED_FC + "2.weight{e}", is_stacked=True),
    Row(_EXPERT_FC + "2.bias", (_STACKED + "down_proj_bias",), REPLICATED, _norm,
        alias=_GROUPED_FC + "2.bias{e}", is_stacked=True),
    Row("decoder.layers.{l}.mlp.router.weight", (_HF_LAYER + "mlp.router.weight",), REPLICATED, _router),
    Row("decoder.layers.{l}.mlp.router.bias", (_HF_LAYER + "mlp.router.bias",), REPLICATED,
        lambda m: [(_moe(m).num_experts,)]),
    Row(_ATTENTION + "linear_proj.bias", (_HF_ATTENTION + "o_proj.bias",), REPLICATED, _norm),
    Row(_ATTENTION + "core_attention.softmax_offset", (_HF_ATTENTION + "sinks",), ROWS, lambda m: [(m.num_heads,)]),
)  # fmt: skip

WEIGHT_MAPS: dict[str, tuple[Row, ...]] = {
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER,
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER,
    "Glm4ForCausalLM": GLM4,
    "Gemma3ForCausalLM": GEMMA3,
    "Qwen3MoeForCausalLM": DECODER,
    "Glm4MoeForCausalLM": DECODER,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "GptOssForCausalLM": GPT_OSS,
}


def hf_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the model's Hugging Face checkpoint, in the order of the model."""
    rows: list[tuple[Row, dict[str, int]]] = [(row, {}) for row in WEIGHT_MAPS[spec.family] if row.where(spec)]
    if spec.moe is not None:
        rows = _repeated(rows, "e", spec.moe.num_experts)
    else:
        rows = [(row, numbers) for row, numbers in rows if "{e}" not in row.megatron]
    num_experts = spec.moe.num_experts if spec.moe else 0
    return {
        name.format(**numbers): (num_experts, *shape) if row.is_stacked else shape
        for row, numbers in _repeated(rows, "l", spec.num_layers)
        if row.in_layer(spec, numbers.get("l", 0))
        for name, shape in zip(row.hf, row.shapes(spec), strict=True)
    }


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in a model of this type: a router's bias is always in float32, because it decides
    between scores that lie close together."""
    return torch.float32 if name.endswith(ROUTER_BIAS) else dtype


def _repeated(rows: list[tuple[Row, dict[str, int]]], what: str, number: int) -> list[tuple[Row, dict[str, int]]]:
    """Return the rows, with those of a layer (or expert), which follow one another, once for each of them."""
    is_inside = [f"{{{what}}}" in row.megatron for row, _ in rows]
    first = is_inside.index(True)
    last = len(rows) - is_inside[::-1].index(True)
    inside = [(row, {**numbers, what: i}) for i in range(number) for row, numbers in rows[first:last]]
    return [*rows[:first], *inside, *rows[last:]]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of this rank and the HF tensors it holds slices of.

    is_copy: a second copy of a tensor that another stage owns: loaded, never exported. expert: which of the model's it
    belongs to, if any, and num_local_experts: how many of them this rank has. num_stacked: of how many experts the
    HF tensors are stacks; 0 = of none, they are the expert's own.
    """

    parameter: torch.nn.Parameter
    hf_names: tuple[str, ...]
    transform: Transform
    is_copy: bool
    expert: int | None = None
    num_local_experts: int = 0
    num_stacked: int = 0

    def expert_on(self, ep_rank: int) -> int:
        """Return the number of the expert whose parameter lies in this one's place on another expert-parallel rank."""
        assert self.expert is not None, f"{self.hf_names} belong to no expert"
        return ep_rank * self.num_local_experts + self.expert % self.num_local_experts

    def hf_names_on(self, ep_rank: int) -> tuple[str, ...]:
        """Return the names where this parameter, of an expert, lies on another expert-parallel rank."""
        number = self.expert_on(ep_rank)
        return tuple(name.replace(f".experts.{self.expert}.", f".experts.{number}.") for name in self.hf_names)


def _match(name: str, row: Row) -> bool:
    return name in (row.megatron, row.alias)


_EXPERT = re.compile(
    r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+|(?<=\.experts\.linear_fc[12]\.bias)\d+"
)


def _named_parameters(chunk: GPTModel) -> Iterator[tuple[str, dict[str, int], list[int], torch.nn.Parameter]]:
    """Yield (name with `{l}` for the layer and `{e}` for the expert, their numbers in the whole model, numbers of all
    experts of this rank, parameter)."""
    for name, parameter in chunk.named_parameters():
        if name.startswith(ADAPTERS):
            continue
        if not name.startswith("decoder.layers."):
            yield name, {}, [], parameter
            continue
        local, _, rest = name.removeprefix("decoder.layers.").partition(".")
        layer = chunk.decoder.layers[int(local)]
        numbers = {"l": layer.layer_number - 1}  # Megatron numbers layers from 1
        experts = []
        if match := _EXPERT.search(rest):
            experts = layer.mlp.local_expert_indices
            numbers["e"] = experts[int(match[0])]
            rest = _EXPERT.sub("{e}", rest)
        yield f"decoder.layers.{{l}}.{rest}", numbers, experts, parameter


def expert_parameters(chunk: GPTModel) -> Iterator[torch.nn.Parameter]:
    """Yield those that belong to one expert."""
    return (parameter for _, numbers, _, parameter in _named_parameters(chunk) if "e" in numbers)


def weight_entries(chunks: list[GPTModel], spec: ModelSpec) -> list[Entry]:
    """Apply the table to this rank's parameters, in a fixed order. Every parameter has exactly one row."""
    rows = [row for row in WEIGHT_MAPS[spec.family] if row.where(spec)]
    entries = []
    for chunk in chunks:
        for name, numbers, experts, parameter in _named_parameters(chunk):
            row = next((row for row in rows if _match(name, row)), None)
            assert row is not None, f"parameter {name} has no row in the weight map of {spec.family}"
            is_copy = name == "output_layer.weight" and spec.tied_embeddings
            names = tuple(hf.format(**numbers) for hf in row.hf)
            num_stacked = spec.moe.num_experts if spec.moe and row.is_stacked else 0
            entries.append(Entry(parameter, names, row.transform, is_copy, numbers.get("e"), len(experts), num_stacked))
    return entries

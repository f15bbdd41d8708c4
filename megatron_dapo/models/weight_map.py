"""Applies the weight rows of a family (huggingface/weight_rows.py) to Megatron's parameters.

Only these entries load a checkpoint, export one and send weights to the servers.

A row gives the axis along which tensor-parallel ranks hold slices of the Hugging Face tensors. For
an expert, these are the expert-tensor-parallel ranks; other expert-parallel ranks do not have the
expert. A row's transform joins a rank's slices into the Megatron shard, and splits the shard again.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_dapo.huggingface.families.qwen3_5 import A_LOG
from megatron_dapo.huggingface.model_spec import DeltaNet, ModelSpec
from megatron_dapo.huggingface.model_tensors import rows_of
from megatron_dapo.huggingface.weight_rows import ROUTER_BIAS, Row

ADAPTERS = "adapters."  # prefix of adapters' names, which have no row: models/lora.py


@dataclass(frozen=True)
class Transform:
    """The way from slices of Hugging Face tensors to a Megatron shard, and back.

    join: slices, in the order of the row -> shard. split: the inverse.
    """

    join: Callable[[list[Tensor], ModelSpec], Tensor]
    split: Callable[[Tensor, ModelSpec], list[Tensor]]


def _join_qkv(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put q, k, v rows into Megatron's order: [group][q heads of the group, k, v][head_dim] rows.

    In all families, the two halves of a head's rotated rows of q and k become the two coordinates
    of each pair. Products of q and k do not depend on the order of the dimensions.

    A gate's rows, below those of its q head, come after all q heads of the group.
    """
    q, k, v = (part.unflatten(0, (-1, spec.head_dim)) for part in parts)
    if spec.rotary_interleaved:
        order = _halves(spec)
        q, k = q[:, order], k[:, order]
    q = q.unflatten(0, (k.size(0), -1, _rows_per_query(spec))).transpose(1, 2).flatten(1, 2)
    return torch.cat([q, k[:, None], v[:, None]], dim=1).flatten(0, 2)


def _split_qkv(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    num_rows = _rows_per_query(spec)
    rows_per_group = num_rows * spec.num_heads // spec.num_kv_heads
    grouped = shard.unflatten(0, (-1, rows_per_group + 2, spec.head_dim))
    q, k, v = grouped.split([rows_per_group, 1, 1], dim=1)
    q = q.unflatten(1, (num_rows, -1)).transpose(1, 2).flatten(1, 2)
    if spec.rotary_interleaved:
        order = torch.tensor(_halves(spec)).argsort()
        q, k = q[:, :, order], k[:, :, order]
    return [part.flatten(0, 2) for part in (q, k, v)]


def _rows_per_query(spec: ModelSpec) -> int:
    """Return 2 if a q head has a gate, of as many rows, else 1."""
    return 2 if spec.attention_output_gate else 1


def _halves(spec: ModelSpec) -> list[int]:
    """Return the places in a checkpoint of a head's rows in Megatron's order.

    In the checkpoint, rotated pairs are neighbours.
    """
    return [*_rotated_order(spec), *range(spec.rotary_dim, spec.head_dim)]


def _join_latent_queries(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put each head's rotated dimensions, the last ones in a checkpoint, first as in
    `_join_qkv`."""
    return parts[0].unflatten(0, (-1, spec.head_dim))[:, _rotated_first(spec)].flatten(0, 1)


def _split_latent_queries(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    order = torch.tensor(_rotated_first(spec)).argsort()
    return [shard.unflatten(0, (-1, spec.head_dim))[:, order].flatten(0, 1)]


def _rotated_first(spec: ModelSpec) -> list[int]:
    """Return the places in a checkpoint of a head's rows in Megatron's order."""
    start = spec.head_dim - spec.rotary_dim
    return [*(start + place for place in _rotated_order(spec)), *range(start)]


def _join_latent(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put the rows of the latent vectors one below the other, and the rotated keys last."""
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
    """Return the places in a checkpoint of the rotated rows in Megatron's order.

    Megatron has both halves of the pairs one after the other.
    """
    rotated = range(spec.rotary_dim)
    return [*rotated[::2], *rotated[1::2]] if spec.rotary_interleaved else list(rotated)


def _join_interleaved(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Put the alternating columns of gate and up one below the other as rows.

    Of biases, the numbers.
    """
    columns = parts[0].t() if parts[0].dim() > 1 else parts[0]
    return torch.cat([columns[::2], columns[1::2]])


def _split_interleaved(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
    columns = torch.stack(shard.chunk(2), dim=1).flatten(0, 1)
    return [columns.t().contiguous() if columns.dim() > 1 else columns]


def _by_key_heads(widths: Callable[[DeltaNet], list[list[int]]]) -> Transform:
    """Return the transform of a delta net: the rows of a key head side by side.

    widths: per Hugging Face tensor, rows of a key head in each of its blocks.
    """

    def rows(num_rows: int, spec: ModelSpec, device: torch.device) -> list[Tensor]:
        """Return the places in the shard of each tensor's rows."""
        by_tensor = widths(_net(spec))
        flat = [width for of_blocks in by_tensor for width in of_blocks]
        places = torch.arange(num_rows, device=device).view(-1, sum(flat))
        blocks = iter(places.split(flat, dim=1))
        return [torch.cat([next(blocks).flatten() for _ in of_blocks]) for of_blocks in by_tensor]

    def join(parts: list[Tensor], spec: ModelSpec) -> Tensor:
        together = torch.cat(parts)
        places = torch.cat(rows(together.size(0), spec, together.device))
        return together[places.argsort()]

    def split(shard: Tensor, spec: ModelSpec) -> list[Tensor]:
        return [shard[places] for places in rows(shard.size(0), spec, shard.device)]

    return Transform(join, split)


def _net(spec: ModelSpec) -> DeltaNet:
    assert spec.delta_net is not None
    return spec.delta_net


def _mixed(net: DeltaNet) -> list[int]:
    """Return the rows of a key head under the convolution: query, key, values."""
    return [net.key_dim, net.key_dim, net.values_per_key * net.value_dim]


def _inputs(net: DeltaNet) -> list[list[int]]:
    values = net.values_per_key
    return [_mixed(net), [values * net.value_dim], [values], [values]]


def _inputs_by_heads(net: DeltaNet) -> list[list[int]]:
    return [[sum(map(sum, _inputs(net)[:2]))], [2 * net.values_per_key]]


SAME = Transform(lambda parts, spec: parts[0], lambda shard, spec: [shard])
TRANSFORMS: dict[str, Transform] = {
    "same": SAME,
    "qkv": Transform(_join_qkv, _split_qkv),
    "stacked": Transform(lambda parts, spec: torch.cat(parts), lambda shard, spec: list(shard.chunk(2))),
    "latent": Transform(_join_latent, _split_latent),
    "latent_queries": Transform(_join_latent_queries, _split_latent_queries),
    "interleaved": Transform(_join_interleaved, _split_interleaved),
    "delta_inputs": _by_key_heads(_inputs),
    "delta_inputs_by_heads": _by_key_heads(_inputs_by_heads),
    "delta_conv": _by_key_heads(lambda net: [_mixed(net)]),
    "transposed": Transform(lambda parts, spec: parts[0].t(), lambda shard, spec: [shard.t().contiguous()]),
}


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in a model of this type.

    A router's bias is always in float32, because it decides between scores that lie close together.
    So is the logarithm of a delta net's decay, because a state keeps its effect over many tokens.
    """
    return torch.float32 if name.endswith((ROUTER_BIAS, A_LOG)) else dtype


def split_blocks(part: Tensor, blocks: Sequence[int], num_ranks: int) -> tuple[Tensor, ...]:
    """Return a rank's rows of each block of a tensor. blocks: heights in the whole tensor."""
    return part.split([height // num_ranks for height in blocks])


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of this rank, and the HF tensors behind it."""

    parameter: torch.nn.Parameter
    hf_names: tuple[str, ...]

    transform: Transform
    """The way from slices of the HF tensors to the parameter."""

    cut: int | None
    """Axis of the HF tensors along which ranks hold slices; None if every rank holds all."""

    blocks: tuple[tuple[int, ...], ...]
    """Per HF tensor, heights of its blocks, one below the other and each cut by itself; () for
    none."""

    is_copy: bool = False
    """Whether it is a second copy of a tensor of another stage: loaded, never exported."""

    expert: int | None = None
    """Number of its expert in the model."""

    num_local_experts: int = 0
    """Number of experts on this rank."""

    num_stacked: int = 0
    """Number of experts stacked in an HF tensor; 0 for an expert's own tensors."""

    sent_together: bool = False
    """Whether a server drops an HF tensor sent in another call than the others."""

    def whole(self, index: int, slices: list[Tensor]) -> Tensor:
        """Return an HF tensor from the ranks' slices of it, in their order."""
        assert self.cut is not None, "what is not cut has no slices"
        if not self.blocks[index]:
            return torch.cat(slices, dim=self.cut)
        of_ranks = [split_blocks(part, self.blocks[index], len(slices)) for part in slices]
        return torch.cat([part for block in zip(*of_ranks, strict=True) for part in block])

    def expert_on(self, ep_rank: int) -> int:
        """Return the number of the expert in this one's place on another expert-parallel rank."""
        assert self.expert is not None, f"{self.hf_names} belong to no expert"
        return ep_rank * self.num_local_experts + self.expert % self.num_local_experts

    def hf_names_on(self, ep_rank: int) -> tuple[str, ...]:
        """Return the names of this parameter, of an expert, on another expert-parallel rank."""
        number = self.expert_on(ep_rank)
        return tuple(name.replace(f".experts.{self.expert}.", f".experts.{number}.") for name in self.hf_names)


def _match(name: str, row: Row) -> bool:
    return name in (row.megatron, row.alias)


_EXPERT = re.compile(
    r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+|(?<=\.experts\.linear_fc[12]\.bias)\d+"
)


def _named_parameters(chunk: GPTModel) -> Iterator[tuple[str, dict[str, int], list[int], torch.nn.Parameter]]:
    """Yield (name, numbers in the whole model, numbers of all experts of this rank, parameter).

    In the name, `{l}` stands for the layer and `{e}` for the expert.
    """
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
    """Yield the parameters of single experts."""
    return (parameter for _, numbers, _, parameter in _named_parameters(chunk) if "e" in numbers)


def weight_entries(chunks: list[GPTModel], spec: ModelSpec) -> list[Entry]:
    """Apply the rows to this rank's parameters, in a fixed order.

    Every parameter has exactly one row.
    """
    rows = rows_of(spec)
    entries = []
    for chunk in chunks:
        for name, numbers, experts, parameter in _named_parameters(chunk):
            row = next((row for row in rows if _match(name, row)), None)
            assert row is not None, f"parameter {name} has no row in the weight map of {spec.family}"
            entries.append(
                Entry(
                    parameter,
                    tuple(hf.format(**numbers) for hf in row.hf),
                    TRANSFORMS[row.transform],
                    row.cut,
                    tuple(row.blocks(spec)) if row.blocks else ((),) * len(row.hf),
                    is_copy=name == "output_layer.weight" and spec.tied_embeddings,
                    expert=numbers.get("e"),
                    num_local_experts=len(experts),
                    num_stacked=spec.moe.num_experts if spec.moe and row.is_stacked else 0,
                    sent_together=row.sent_together,
                )
            )
    return entries

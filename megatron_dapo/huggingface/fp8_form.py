"""FP8 weights of servers: which tensors they hold in blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import rows_of
from megatron_dapo.huggingface.weight_rows import Row

BLOCK = 128
"""Rows, and columns, of a block: float8 (e4m3) weights with one float32 scale."""


@dataclass(frozen=True)
class OddWidth:
    """A width on a rank of a server that blocks do not fill."""

    module: str
    size: int
    of_experts: bool


def has_expert_blocks(spec: ModelSpec) -> bool:
    """Return whether a model has experts, and servers hold them in blocks."""
    return any(row.of_experts and row.in_blocks(0) for row in rows_of(spec))


def odd_widths(spec: ModelSpec, num_ranks: int, num_expert_ranks: int) -> list[OddWidth]:
    """Return the widths on a server's ranks that are no multiples of BLOCK, and have to be: else a
    rank's part, or a tensor below another, would begin inside a block.

    num_expert_ranks: ranks that share an expert.
    """
    odd = []
    for row in rows_of(spec):
        if not any(row.in_layer(spec, layer) for layer in range(spec.num_layers)):
            continue
        ranks = num_expert_ranks if row.of_experts else num_ranks
        for index, module in enumerate(row.modules):
            widths = _widths(row, index, spec, ranks) if row.in_blocks(index) else ()
            odd += [OddWidth(module, width, row.of_experts) for width in widths if width % BLOCK]
    return odd


def _widths(row: Row, index: int, spec: ModelSpec, ranks: int) -> Iterator[int]:
    """Yield a rank's columns of a tensor, and its rows if they are cut or above another tensor's."""
    rows, columns = row.shapes(spec)[index]
    yield columns // ranks if row.cut == 1 else columns
    if row.cut == 0:
        for height in (row.blocks(spec)[index] if row.blocks else ()) or (rows,):
            yield height // min(ranks, height // row.unit(spec))
    elif index < len(row.hf) - 1:
        yield rows

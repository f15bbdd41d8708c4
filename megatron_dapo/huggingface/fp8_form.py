"""FP8 weights of servers: which tensors they hold in blocks, and what SGLang is told of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import ServedTensor, rows_of
from megatron_dapo.huggingface.weight_rows import Row

BLOCK = 128
"""Rows, and columns, of a block: float8 (e4m3) weights with one float32 scale."""

SCALE_ENDING = "_scale_inv"
"""Ending of the name of a tensor's scales, after the tensor's own name."""


def quantization_config(spec: ModelSpec) -> dict[str, Any]:
    """Return `quantization_config` of a checkpoint whose products are in blocks."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    kept = list(dict.fromkeys(name for row in rows_of(spec) for name in row.unquantized))
    return config | ({"modules_to_not_convert": kept} if kept else {})


def has_expert_blocks(spec: ModelSpec) -> bool:
    """Return whether a model has experts, and servers hold them in blocks."""
    return any(row.of_experts and row.in_blocks(0) for row in rows_of(spec))


def scales_of(served: ServedTensor) -> ServedTensor:
    """Return a server's form of a tensor's scales: one per block, cut where the tensor is."""
    heights = tuple(ceil_div(height, BLOCK) for height in served.blocks)
    unit = max(1, served.unit // BLOCK)
    return replace(served, blocks=heights, unit=unit, types=(), in_blocks=False, is_scale=True)


def odd_widths(spec: ModelSpec, num_ranks: int, num_expert_ranks: int) -> list[tuple[str, int]]:
    """Return (module, width on a server's rank) that is no multiple of BLOCK, and has to be: else a
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
            odd += [(module, width) for width in widths if width % BLOCK]
    return odd


def _widths(row: Row, index: int, spec: ModelSpec, ranks: int) -> Iterator[int]:
    """Yield a rank's columns of a tensor, and its rows where they are cut or above another's."""
    rows, columns = row.shapes(spec)[index]
    yield columns // ranks if row.cut == 1 else columns
    if row.cut == 0:
        for height in (row.blocks(spec)[index] if row.blocks else ()) or (rows,):
            yield height // min(ranks, height // row.unit(spec))
    elif index < len(row.hf) - 1:
        yield rows

"""The tensors of a model, by its weight rows: in its checkpoint, and on a server of SGLang.

The checkpoint is a Hugging Face one.
"""

import math
from dataclasses import dataclass
from functools import cache

from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.weight_rows import ATTENTION, Row


@dataclass(frozen=True)
class ServedTensor:
    """A server's form of a Hugging Face tensor (SGLang)."""

    parameter: str
    """Name of the server's parameter with the tensor."""

    place: tuple[int, int] = (0, 0)
    """Order among the tensors of that parameter: number of the expert, number in the row."""

    cut: int | None = None
    """Axis of the tensor cut by tensor parallelism; None if every rank holds all."""

    blocks: tuple[int, ...] = ()
    """Heights of its blocks, one below the other, each cut by itself; () for none."""

    unit: int = 1
    """Rows kept together by a cut; ranks in excess of the units repeat them."""

    types: tuple[str, ...] = ()
    """Types for holding it, the usual one first; () for the trainer's type."""

    is_transposed: bool = False
    """Whether the last two axes change places."""

    on_first_rank: bool = False
    """Whether the first rank holds it whole and the others hold zeros."""

    in_blocks: bool = False
    """Whether a server with FP8 weights holds it in blocks."""

    is_scale: bool = False
    """Whether it has the scales of the blocks of the tensor before it in the parameter."""


def rows_of(spec: ModelSpec) -> list[Row]:
    """Return the rows of a model."""
    return [row for row in FAMILIES[spec.family].rows if row.where(spec)]


def linear_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Return the last names of a layer's linear modules, experts' too, in the order of the rows."""
    rows = [row for layer in range(spec.num_layers) for row in rows_of_layer(spec, layer)]
    return tuple(dict.fromkeys(name for row in rows for name in row.modules))


def expert_modules(spec: ModelSpec) -> set[str]:
    """Return the last names of the linear modules of experts."""
    return {name for row in rows_of(spec) if row.of_experts for name in row.modules}


def rows_of_layer(spec: ModelSpec, layer: int) -> list[Row]:
    """Return the rows of a layer, counted from 0."""
    return [row for row in rows_of(spec) if "{l}" in row.megatron and row.in_layer(spec, layer)]


@cache
def attention_weights(spec: ModelSpec) -> int:
    """Return the number of weights in the linear modules of a layer's attention."""
    rows = [row for row in rows_of_layer(spec, 0) if row.megatron.startswith(ATTENTION) and row.modules]
    return sum(math.prod(shape) for row in rows for shape in row.shapes(spec))


@cache
def product_weights(spec: ModelSpec, layer: int) -> int:
    """Return the number of a layer's weights in a token's products; of experts, the token's."""
    per_token = spec.moe.experts_per_token if spec.moe else 0
    return sum(
        math.prod(shape) * (per_token if row.of_experts else 1)
        for row in rows_of_layer(spec, layer)
        for shape in row.shapes(spec)
        if len(shape) == 2
    )


def hf_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the model's checkpoint, in the order of the model.

    The names are Hugging Face's.
    """
    num_experts = spec.moe.num_experts if spec.moe else 0
    return {
        name.format(**numbers): (num_experts, *shape) if row.is_stacked else shape
        for row, numbers in _numbered(spec)
        for name, shape in zip(row.hf, row.shapes(spec), strict=True)
    }


def served_tensors(spec: ModelSpec) -> dict[str, ServedTensor]:
    """Return Hugging Face name -> a server's form of each tensor of the model."""
    return {
        name.format(**numbers): _served(row, index, numbers, spec)
        for row, numbers in _numbered(spec)
        for index, name in enumerate(row.hf)
    }


def _served(row: Row, index: int, numbers: dict[str, int], spec: ModelSpec) -> ServedTensor:
    """Return a server's form of one of a row's tensors. numbers: of layer and expert."""
    shape = row.shapes(spec)[index]
    first_axis = 1 if row.is_stacked else 0
    served_as = row.served_as[index] if isinstance(row.served_as, tuple) else row.served_as
    return ServedTensor(
        parameter=(served_as or row.hf[index]).format(**numbers),
        place=(numbers.get("e", 0), index),
        cut=None if row.cut is None else first_axis + row.cut,
        blocks=row.blocks(spec)[index] if row.blocks else (),
        unit=row.unit(spec),
        types=row.served_types(spec),
        is_transposed=row.is_stacked and len(shape) == 2,
        on_first_rank=row.served_once,
        in_blocks=row.in_blocks(index),
    )


def _numbered(spec: ModelSpec) -> list[tuple[Row, dict[str, int]]]:
    """Return (row, numbers) in the order of the model, once for each layer and expert."""
    rows: list[tuple[Row, dict[str, int]]] = [(row, {}) for row in rows_of(spec)]
    if spec.moe is not None:
        rows = _repeated(rows, "e", spec.moe.num_experts)
    rows = _repeated(rows, "l", spec.num_layers)
    return [(row, numbers) for row, numbers in rows if row.in_layer(spec, numbers.get("l", 0))]


def _repeated(rows: list[tuple[Row, dict[str, int]]], what: str, number: int) -> list[tuple[Row, dict[str, int]]]:
    """Return the rows, with a layer's (or expert's) neighbouring rows once for each of them."""
    is_inside = [f"{{{what}}}" in row.megatron for row, _ in rows]
    first = is_inside.index(True)
    last = len(rows) - is_inside[::-1].index(True)
    inside = [(row, {**numbers, what: i}) for i in range(number) for row, numbers in rows[first:last]]
    return [*rows[:first], *inside, *rows[last:]]

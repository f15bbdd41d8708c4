"""The weights on a GPU of a server, by the model's rows: in the trainer's type, or in FP8 blocks.

With `rollout.quantization: fp8` a product of attention, MLP or expert has a byte per number, and a
float32 scale per block of 128 x 128 (arXiv 2412.19437, section 3.3.2). Embedding, head, norms,
routers and the narrow products of delta nets keep the trainer's type.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache

from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.config.derived import server_expert_parts
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.pipeline import kinds_of
from megatron_dapo.huggingface.fp8_form import BLOCK, has_expert_blocks, odd_widths
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import rows_of, rows_of_layer
from megatron_dapo.huggingface.weight_rows import Row

_SCALE = 4  # bytes
_WIDTHS = {"float32": 4, "bfloat16": 2}


def holds_blocks(config: Config) -> bool:
    """Return whether the servers hold FP8 blocks."""
    return config.actor_rollout_ref.rollout.quantization == "fp8"


def fills_blocks(config: Config, spec: ModelSpec, tp: int) -> bool:
    """Return whether the parts of a model on a server's GPUs consist of whole blocks: SGLang
    refuses others. With `--ep-size` experts are whole, or in larger parts."""
    ep = server_expert_parts(config, tp)
    return tp % ep == 0 and has_expert_blocks(spec) and not odd_widths(spec, tp, tp // ep)


@cache
def weight_bytes(spec: ModelSpec, width: int, tp: int = 1, *, in_blocks: bool = False) -> int:
    """Return the bytes of a model's weights on each of a server's `tp` GPUs.

    A GPU has its part of what is cut, but at least a key-value head, and all of the rest. width:
    bytes of a number in the trainer's type.
    """

    def of(rows: Iterable[Row]) -> int:
        parts = {name: part for row in rows for name, part in _parts(spec, row, width, tp, in_blocks=in_blocks)}
        return sum(parts.values())  # a tied embedding once

    layers = kinds_of(spec, range(spec.num_layers)).items()
    outside = of(row for row in rows_of(spec) if "{l}" not in row.megatron)
    return outside + sum(number * of(rows_of_layer(spec, layer)) for layer, number in layers)


def _parts(spec: ModelSpec, row: Row, width: int, tp: int, *, in_blocks: bool) -> Iterator[tuple[str, int]]:
    """Yield (name, a GPU's bytes) of a row's tensors; an expert's stand for those of all."""
    types = row.served_types(spec)
    number = spec.moe.num_experts if row.of_experts and spec.moe else 1
    for index, (name, shape) in enumerate(zip(row.hf, row.shapes(spec), strict=True)):
        num_bytes = number * math.prod(shape) * (_WIDTHS[types[0]] if types else width)
        if in_blocks and row.in_blocks(index):
            num_bytes = number * (math.prod(shape) + _SCALE * math.prod(ceil_div(size, BLOCK) for size in shape))
        units = 1 if row.cut is None else shape[row.cut] // row.unit(spec)
        yield name, ceil_div(num_bytes, max(1, min(tp, units)))

"""Block sizes of the Triton kernels over rows of logits, per architecture and vocabulary, from
tuning.json.

Nothing is tuned at run time: ranks with different choices would round differently. To add a size,
measure it (benchmarks/) and write a row into the table.

The row of a vocabulary (one rank's share) is the first one of its architecture with a large enough
`max_vocabulary`. Others get `default`, which works on every GPU since sm_80 and is not fast.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True)
class RowTiles:
    """Kernels over logits: columns that one program holds at once."""

    block_v: int
    num_warps: int


@functools.cache
def architecture(device: torch.device) -> str:
    """Return `sm_90` and so on, or `cpu` without a GPU; minor versions share the row of their
    generation."""
    if device.type != "cuda":
        return device.type
    return f"sm_{torch.cuda.get_device_capability(device)[0]}0"


@functools.cache
def lookup(arch: str, vocabulary: int) -> RowTiles:
    """Return the choice for one rank's share of the vocabulary."""
    for row in _table()["shapes"]:
        if row["architecture"] == arch and vocabulary <= row["max_vocabulary"]:
            return RowTiles(row["block_v"], row["num_warps"])
    return default()


def default() -> RowTiles:
    """Return the block sizes for vocabularies without a row."""
    return RowTiles(**_table()["default"])


@functools.cache
def _table() -> dict:
    return json.loads(TABLE.read_text())

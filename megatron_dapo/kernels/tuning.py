"""Block sizes of the Triton kernels, per architecture and shape, from the table in tuning.json.

Nothing is tuned while the program runs: ranks that measured for themselves could choose differently and would then
round differently. A shape is added by measuring it (benchmarks/) and writing a row into the table.

The row of a shape is the first one of its architecture whose `max_hidden` and `max_vocabulary` it does not exceed, the
vocabulary being one rank's share. A shape or architecture without a row gets `default`, which is small enough for the
shared memory of every GPU since sm_80, and not fast.
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


@dataclass(frozen=True)
class LinearTiles:
    """The matrix product with statistics. Its result's bits depend on block_n, block_k and tiles_per_split."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int  # row tiles worked on at the same time: what they read together should fit the L2 cache
    tiles_per_split: int  # column tiles that one program merges by itself


@dataclass(frozen=True)
class Tuning:
    """What was chosen for one architecture and shape. forward: statistics without a gradient by plain matrix products
    ("gemm") or by the kernel that never writes logits ("fused")."""

    forward: str
    rows: RowTiles
    linear: LinearTiles


@functools.cache
def architecture(device: torch.device) -> str:
    """`sm_90` and so on; minor versions share the row of their generation. `cpu` where there is no GPU."""
    if device.type != "cuda":
        return device.type
    return f"sm_{torch.cuda.get_device_capability(device)[0]}0"


@functools.cache
def lookup(arch: str, hidden_size: int, vocabulary: int) -> Tuning:
    """The choice for `hidden_size` and one rank's share of the vocabulary; 0 where a size does not matter."""
    table = _table()
    return next((_tuning(row) for row in table["shapes"] if _covers(row, arch, hidden_size, vocabulary)), default())


def default() -> Tuning:
    return _tuning(_table()["default"])


@functools.cache
def _table() -> dict:
    return json.loads(TABLE.read_text())


def _covers(row: dict, arch: str, hidden_size: int, vocabulary: int) -> bool:
    return row["architecture"] == arch and hidden_size <= row["max_hidden"] and vocabulary <= row["max_vocabulary"]


def _tuning(row: dict) -> Tuning:
    return Tuning(
        forward=row["forward"],
        rows=RowTiles(**row["rows"]),
        linear=LinearTiles(**row["linear"]),
    )

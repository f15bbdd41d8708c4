"""Selects the rows of hidden states for the head, and cuts them into chunks.

Only rows with loss enter a product. With sequence parallelism every rank holds a slice of the rows.
A chunk takes the same range of each slice's counted rows, so that one all-gather of equal parts
suffices, and only counted rows travel. The plan is computed from the mask on the host: no chunk
waits for the device.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowChunk:
    """One chunk of n counted rows."""

    local: Tensor
    """[k] rows of this rank's slice, k <= width; all n of them if hidden states are not cut."""
    width: int
    """Rows that every slice sends."""
    kept: Tensor | None
    """[n] positions of the chunk's rows among the gathered [slices * width] ones; None: all of
    these count."""
    places: Tensor | slice
    """[n] positions of the chunk's rows among all counted rows."""
    num_rows: int


@dataclass(frozen=True, eq=False)
class RowPlan:
    """The chunks of a batch's counted rows."""

    chunks: tuple[RowChunk, ...]
    """Together every counted row once."""
    num_counted: int
    """N."""
    chunk_size: int
    group: dist.ProcessGroup | None
    """The ranks among which rows are cut, or None."""

    @classmethod
    def make(
        cls,
        counted_rows: np.ndarray,
        num_rows: int,
        chunk_size: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> "RowPlan":
        """Return the plan for the counted rows, cut into chunks. Arguments are equal on all ranks
        of the group, except the device.

        Args:
            counted_rows: [N] int64, ascending, below num_rows.
            group: the ranks among which rows are cut (sequence parallelism): row r is on rank r //
                (num_rows / size). None: every rank holds all rows.
        """
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        assert num_rows % size == 0, f"{num_rows} rows cannot be cut into {size} equal slices"
        chunks = [
            RowChunk(
                to_device(rows_by_rank[rank] - rank * (num_rows // size), device),
                width,
                None if all(len(rows) == width for rows in rows_by_rank) else to_device(kept, device),
                slice(int(places[0]), int(places[-1]) + 1) if size == 1 else to_device(places, device),
                len(places),
            )
            for rows_by_rank, width, kept, places in _cut(counted_rows, num_rows // size, size, chunk_size)
        ]
        return cls(tuple(chunks), len(counted_rows), chunk_size, group if size > 1 else None)

    def counted_alone(self) -> "RowPlan":
        """Return the same chunks for hidden states reduced to this rank's counted rows, in
        order."""
        starts = np.cumsum([0, *(len(chunk.local) for chunk in self.chunks)])
        device = self.chunks[0].local.device if self.chunks else None
        chunks = [
            replace(chunk, local=torch.arange(start, start + len(chunk.local), device=device))
            for chunk, start in zip(self.chunks, starts[:-1].tolist(), strict=True)
        ]
        return replace(self, chunks=tuple(chunks))

    def kept_rows(self, hidden_LH: Tensor) -> Tensor:
        """Return [k, H]: a copy of this rank's counted rows, in the order of `counted_alone`."""
        if not self.chunks:
            return hidden_LH[:0].clone()
        return hidden_LH.index_select(0, torch.cat([chunk.local for chunk in self.chunks]))


def _cut(counted: np.ndarray, rows_per_slice: int, num_slices: int, chunk_size: int):
    """Yield (rows of each slice, width, kept, places) per chunk; see RowChunk."""
    bounds = np.searchsorted(counted, rows_per_slice * np.arange(num_slices + 1))
    lengths = np.diff(bounds)
    start = 0
    while start < lengths.max(initial=0):
        # the slices with rows left share the chunk equally: it stays full even if only one has rows
        width = max(1, chunk_size // int((lengths > start).sum()))
        width = min(width, int(lengths.max()) - start)
        ranges = [np.arange(first + min(start, n), first + min(start + width, n)) for first, n in _pairs(bounds)]
        kept = np.concatenate([i * width + np.arange(len(range_)) for i, range_ in enumerate(ranges)])
        yield [counted[range_] for range_ in ranges], width, kept, np.concatenate(ranges)
        start += width


def _pairs(bounds: np.ndarray) -> list[tuple[int, int]]:
    return [(int(a), int(b - a)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def to_device(index: np.ndarray, device: torch.device) -> Tensor:
    """Return int64 on the device without waiting: torch keeps the pinned memory until the copy is
    done."""
    tensor = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

"""The segments of a packed row, put together by length: those of one length are a batch without padding."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SegmentsByLength:
    """An order of a row's T tokens in which segments of one length stand one after the other.

    order, inverse: [T] int64; row[order] is sorted, sorted[inverse] is the row again.
    shapes: (number of segments, their length), by rising length.
    """

    order: Tensor
    inverse: Tensor
    shapes: tuple[tuple[int, int], ...]

    def batches(self, sorted_row: Tensor) -> Iterator[Tensor]:
        """Yield views [segments, length, ...] of [T, ...] in the sorted order."""
        sizes = [number * length for number, length in self.shapes]
        for part, shape in zip(sorted_row.split(sizes), self.shapes, strict=True):
            yield part.unflatten(0, shape)


# The layers of a model ask one after the other; in a pipeline a few micro-batches take turns.
@lru_cache(maxsize=16)
def segments_by_length(bounds: tuple[int, ...], device: torch.device) -> SegmentsByLength:
    """Return the order for segments between neighbouring bounds, from 0 to T. Empty segments hold no token."""
    spans = sorted((pair for pair in pairwise(bounds) if pair[0] < pair[1]), key=_length)
    order = torch.cat([torch.arange(start, end) for start, end in spans]).to(device)
    shapes = tuple((len(list(same)), length) for length, same in groupby(spans, key=_length))
    return SegmentsByLength(order, order.argsort(), shapes)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]

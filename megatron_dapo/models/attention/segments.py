"""The segments of a packed row, sorted by length: segments of one length are a batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dapo.common.sizes import round_up


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of a packed row, with the segments' bounds on the host, too."""

    bounds: tuple[int, ...] = ()
    """From 0 to the row's length."""


@dataclass(frozen=True, eq=False)
class SegmentsByLength:
    """An order of a row's T tokens, with segments of one length side by side."""

    order: Tensor
    """[P] int64, P >= T: row[order] is sorted; padding repeats a segment's last token at its
    end."""
    inverse: Tensor
    """[T] int64: sorted[inverse] is the row again."""
    shapes: tuple[tuple[int, int], ...]
    """(number of segments, their length with padding), by rising length."""

    def batches(self, sorted_row: Tensor) -> Iterator[Tensor]:
        """Yield views [segments, length, ...] of [T, ...] in the sorted order."""
        sizes = [number * length for number, length in self.shapes]
        for part, shape in zip(sorted_row.split(sizes), self.shapes, strict=True):
            yield part.unflatten(0, shape)


# The layers of a model ask one after the other; in a pipeline, a few micro-batches take turns.
@lru_cache(maxsize=16)
def segments_by_length(bounds: tuple[int, ...], device: torch.device, *, padded: bool = False) -> SegmentsByLength:
    """Return the order for segments between neighbouring bounds, from 0 to T.

    Empty segments hold no token. padded: round lengths up, so that more segments share a batch. The
    padded length depends only on a segment's own length: it is computed like any other of this
    length, beside any neighbours.
    """
    spans = sorted((pair for pair in pairwise(bounds) if pair[0] < pair[1]), key=_length)
    widths = [_padded(_length(span)) if padded else _length(span) for span in spans]
    inverse = torch.empty(bounds[-1], dtype=torch.int64)
    order = []
    place = 0
    for (start, end), width in zip(spans, widths, strict=True):
        order.append(torch.arange(start, start + width).clamp(max=end - 1))
        inverse[start:end] = torch.arange(place, place + end - start)
        place += width
    shapes = tuple((len(list(same)), width) for width, same in groupby(widths))
    return SegmentsByLength(torch.cat(order).to(device), inverse.to(device), shapes)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _padded(length: int) -> int:
    """Return the next multiple of 8 up to 128, of 16 up to 256, and so on.

    Above 56, it is at most an eighth more.
    """
    return round_up(length, max(8, 2 ** (length.bit_length() - 4)))

"""Bins filled as far as lengths allow: one to three last lengths leave the least room free.

The remaining lengths are bits of one number, so one operation finds every pair with a given sum.
Its steps are the tokens of a bin, for any number of samples: the search is linear in the samples,
and longest_first sorts.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron_dapo.common.sizes import round_up
from megatron_dapo.data.batching import TrainSample, longest_first
from megatron_dapo.data.bins import Bin, Bins

_MOST_LOST = 16  # tokens left free by a pair; a single length leaving fewer is taken in its place
_NUM_FIRSTS = 4  # lengths tried as the longest of three


class _Filling(NamedTuple):
    """The last lengths of a bin, and the tokens left free by them."""

    lost: int
    sizes: tuple[int, ...] = ()


class _Lengths:
    """The samples outside all bins yet, by their length with its padding."""

    def __init__(self, samples: Iterable[TrainSample], capacity: int, segment_multiple: int) -> None:
        self._capacity = capacity
        self._samples: dict[int, Bin] = {}
        for sample in reversed(longest_first(samples)):
            self._samples.setdefault(round_up(sample.length, segment_multiple), []).append(sample)
        self._bits = 0  # bit s: there is a sample of s tokens
        self._mirrored = 0  # bit capacity - s
        for size in self._samples:
            self._toggle(size)

    def __bool__(self) -> bool:
        return bool(self._bits)

    def longest(self, room: int) -> int:
        """Return the longest length within the room, 0 without any."""
        return max(0, (self._bits & ((1 << (room + 1)) - 1)).bit_length() - 1)

    def take(self, size: int) -> TrainSample:
        """Return a sample of this length, from now on in a bin."""
        left = self._samples[size]
        if len(left) == 1:
            self._toggle(size)
        return left.pop()

    def best(self, room: int) -> _Filling:
        """Return the fewest lengths, three at most, leaving the least of the room free."""
        longest = self.longest(room)
        best = _Filling(room - longest, (longest,))
        best = self._pair(room, best) or best
        first = longest
        for _ in range(_NUM_FIRSTS):
            if not best.lost or not first:
                break
            best = self._with(first, room, best) or best
            first = self.longest(first - 1)
        return best

    def _with(self, first: int, room: int, best: _Filling) -> _Filling | None:
        """Return a filling of this length and two more if it is better than `best`."""
        sample = self.take(first)
        pair = self._pair(room - first, best)
        if not self._samples[first]:
            self._toggle(first)
        self._samples[first].append(sample)
        return pair and _Filling(pair.lost, (first, *pair.sizes))

    def _pair(self, room: int, best: _Filling) -> _Filling | None:
        """Return the pair leaving the least of the room free if it is better than `best`.

        Of equally good pairs it is the one with the longest length.
        """
        for lost in range(min(best.lost, _MOST_LOST, room)):
            total = room - lost
            # bit s of the second number: there is a sample of total - s tokens
            longer = (self._bits & (self._mirrored >> (self._capacity - total)) & ((1 << total) - 1)).bit_length() - 1
            if 2 * longer == total and len(self._samples[longer]) < 2:
                # the longer length is at least half of the pair's sum: there is no other pair
                continue
            if longer > 0:
                return _Filling(lost, (longer, total - longer))
        return None

    def _toggle(self, size: int) -> None:
        self._bits ^= 1 << size
        self._mirrored ^= 1 << (self._capacity - size)


def tight(samples: Iterable[TrainSample], capacity: int, segment_multiple: int = 1) -> Bins:
    """Return bins of at most `capacity` tokens, each sample padded to segment_multiple.

    The longest remaining sample opens a bin. Further ones follow as long as three of that length
    would not fill it, and the best last lengths complete it.

    No sample is longer than `capacity`. Of equal lengths the lowest sample_id comes first.
    """
    lengths = _Lengths(samples, capacity, segment_multiple)
    bins: Bins = []
    while lengths:
        room = capacity
        bin_: Bin = []
        while longest := lengths.longest(room):
            is_open = not bin_ or room >= 3 * longest
            for size in (longest,) if is_open else lengths.best(room).sizes:
                bin_.append(lengths.take(size))
                room -= size
        bins.append(longest_first(bin_))
    return bins

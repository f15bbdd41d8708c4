"""Bins filled as far as lengths allow: each is completed by the one, two or three lengths that leave the least room.

The lengths that are left are bits of one number, so that one operation finds every pair with a given sum. It takes as
many steps as a bin has tokens, however many samples there are: the search is linear in them, and longest_first sorts.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron_dapo.common.sizes import round_up
from megatron_dapo.data.batching import TrainSample, longest_first
from megatron_dapo.data.bins import Bin, Bins

_MOST_LOST = 16  # tokens that a pair may leave free; one length that leaves less is taken in its place
_NUM_FIRSTS = 4  # lengths that are tried as the longest of three


class _Filling(NamedTuple):
    """What completes a bin: lengths, and the tokens that they leave free."""

    lost: int
    sizes: tuple[int, ...] = ()


class _Lengths:
    """The samples that are in no bin yet, by their length with its padding."""

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
        """Return the longest length that the room holds, 0 where none does."""
        return max(0, (self._bits & ((1 << (room + 1)) - 1)).bit_length() - 1)

    def take(self, size: int) -> TrainSample:
        """Return a sample of this length, which is in a bin from now on."""
        left = self._samples[size]
        if len(left) == 1:
            self._toggle(size)
        return left.pop()

    def best(self, room: int) -> _Filling:
        """Return the at most three lengths that leave the least of the room free, of equally good ones the fewest."""
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
        """Return a filling of this length and two more that is better than `best`."""
        sample = self.take(first)
        pair = self._pair(room - first, best)
        if not self._samples[first]:
            self._toggle(first)
        self._samples[first].append(sample)
        return pair and _Filling(pair.lost, (first, *pair.sizes))

    def _pair(self, room: int, best: _Filling) -> _Filling | None:
        """Return the pair that leaves the least of the room free, the one with the longest length, if it is better than
        `best`."""
        for lost in range(min(best.lost, _MOST_LOST, room)):
            total = room - lost
            # bit s of the second number: there is a sample of total - s tokens
            longer = (self._bits & (self._mirrored >> (self._capacity - total)) & ((1 << total) - 1)).bit_length() - 1
            if 2 * longer == total and len(self._samples[longer]) < 2:
                continue  # of a pair, the longer length is at least half of the sum: there is no other
            if longer > 0:
                return _Filling(lost, (longer, total - longer))
        return None

    def _toggle(self, size: int) -> None:
        self._bits ^= 1 << size
        self._mirrored ^= 1 << (self._capacity - size)


def tight(samples: Iterable[TrainSample], capacity: int, segment_multiple: int = 1) -> Bins:
    """Return bins of at most `capacity` tokens, each sample padded to segment_multiple: the longest sample that is left
    opens one, further ones follow as long as three of that length would not fill it, and what is best completes it.

    No sample is longer than that. Of equal lengths the lowest sample_id comes first.
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

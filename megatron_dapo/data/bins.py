"""The bins that become micro-batches: first-fit-decreasing, balanced, halved. Each takes n log n steps for n samples.

A tree or a heap names the bin that comes next, so no sample is compared with all bins.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, count

from megatron_dapo.common.sizes import ceil_div, round_up
from megatron_dapo.data.batching import CostModel, TrainSample, longest_first

Bin = list[TrainSample]
Bins = list[Bin]


def first_fit_decreasing(
    samples: Iterable[TrainSample],
    max_tokens: int,
    pad_multiple: int = 1,
    packed: bool = True,
    segment_multiple: int = 1,
) -> Bins:
    """Return bins: the longest sample first, each in the first bin where it fits. No sample is longer than the cap.

    max_tokens counts padding: of every sample to segment_multiple and of the bin's sum to pad_multiple, its multiple,
    if packed; otherwise of every row to the longest one's.
    """
    ordered = longest_first(samples)
    if not packed:
        return list(_rectangles(ordered, max_tokens, pad_multiple))
    free_room = _FreeRoom(len(ordered), usable_tokens(max_tokens, pad_multiple))
    bins: Bins = []
    for sample in ordered:
        place = free_room.take_first(round_up(sample.length, segment_multiple))
        if place == len(bins):
            bins.append([])
        bins[place].append(sample)
    return bins


def usable_tokens(max_tokens: int, pad_multiple: int) -> int:
    """Return how many tokens of samples a packed bin holds: what is more is over the cap once it is padded."""
    return max_tokens // pad_multiple * pad_multiple


def least_bins(sizes: Sequence[int], capacity: int) -> int:
    """Return a number of bins below which samples of these sizes cannot go: as many as hold all their tokens, or all
    samples, if each bin held as many as the shortest ones that fit into it together."""
    most_in_one = bisect_right(list(accumulate(sorted(sizes))), capacity)
    return max(ceil_div(sum(sizes), capacity), ceil_div(len(sizes), max(1, most_in_one)))


def _rectangles(ordered: Iterable[TrainSample], max_tokens: int, pad_multiple: int) -> Iterator[Bin]:
    """Yield bins whose rows are as wide as their first sample, the longest one.

    A bin that has no room for one more row never has room again, so only the last bin can have some.
    """
    bin_: Bin = []
    for sample in ordered:
        if bin_ and (len(bin_) + 1) * round_up(bin_[0].length, pad_multiple) > max_tokens:
            yield bin_
            bin_ = []
        bin_.append(sample)
    if bin_:
        yield bin_


class _FreeRoom:
    """The free room of bins in a row, as a tournament tree: every node holds the most that a bin below it has.

    The children of node i are 2 i and 2 i + 1; the leaves are the bins.
    """

    def __init__(self, num_bins: int, capacity: int) -> None:
        self._first_leaf = 1 << max(0, num_bins - 1).bit_length()
        self._most = [capacity] * (2 * self._first_leaf)

    def take_first(self, size: int) -> int:
        """Return the first bin with room for `size`, which has that much less from now on. There is one."""
        most = self._most
        assert most[1] >= size, f"no bin has room for {size} tokens"
        node = 1
        while node < self._first_leaf:
            node *= 2
            if most[node] < size:
                node += 1
        place = node - self._first_leaf
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
        return place


def balanced(
    samples: Iterable[TrainSample], num_bins: int, capacity: int, cost: CostModel, segment_multiple: int = 1
) -> Bins | None:
    """Return num_bins bins of about equal cost, the longest sample first into the cheapest bin with room for it.

    Of equally cheap bins the first. None if it does not work out: the cap is hard, and only first-fit-decreasing is
    known to need no more bins.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    free_room = [capacity] * num_bins
    # Heaps of (cost, bin) and (-free room, (cost, bin)). Samples get shorter: a bin that comes back from the second has
    # room for all that follow until it gets one of them, so there are no more such moves than samples.
    cheapest = [(0.0, place) for place in range(num_bins)]
    too_full: list[tuple[int, tuple[float, int]]] = []
    for sample in longest_first(samples):
        size = round_up(sample.length, segment_multiple)
        while too_full and -too_full[0][0] >= size:
            heappush(cheapest, heappop(too_full)[1])
        while cheapest and free_room[cheapest[0][1]] < size:
            candidate = heappop(cheapest)
            heappush(too_full, (-free_room[candidate[1]], candidate))
        if not cheapest:
            return None
        cost_before, place = cheapest[0]
        bins[place].append(sample)
        free_room[place] -= size
        heapreplace(cheapest, (cost_before + cost(sample.length), place))
    return bins


def halved(bins: Bins, num_bins: int, cost: CostModel) -> Bins:
    """Return num_bins bins made by halving the costliest, of equal ones the first; halves stand behind all others.

    The bins hold samples by falling length. Once every sample has its own bin, empty ones are added.
    """
    parts = dict(enumerate(bins))
    next_number = count(len(bins))
    divisible = [(-_running_costs(bin_, cost)[-1], number) for number, bin_ in parts.items() if len(bin_) > 1]
    heapify(divisible)
    while len(parts) < num_bins and divisible:
        _, number = heappop(divisible)
        for half in _halves(parts.pop(number), cost):
            number = next(next_number)
            parts[number] = half
            if len(half) > 1:
                heappush(divisible, (-_running_costs(half, cost)[-1], number))
    return [*parts.values(), *([] for _ in range(num_bins - len(parts)))]


def _halves(bin_: Bin, cost: CostModel) -> tuple[Bin, Bin]:
    """Return the bin in two: the first part grows, from one sample on, while it is at most half of the cost."""
    costs = _running_costs(bin_, cost)
    middle = next(i for i in range(1, len(bin_)) if 2 * costs[i] > costs[-1])
    return bin_[:middle], bin_[middle:]


def _running_costs(bin_: Bin, cost: CostModel) -> list[float]:
    """Return the cost of the first sample, of the first two, and so on."""
    return list(accumulate(cost(sample.length) for sample in bin_))

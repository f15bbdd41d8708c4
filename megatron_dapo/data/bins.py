"""The bins of samples for micro-batches: rectangles, balanced, halved.

tight_bins.py fills the fewest packed ones. Each takes n log n steps for n samples: a heap names the
next bin, so no sample is compared with all bins.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, count

from megatron_dapo.common.sizes import round_up
from megatron_dapo.data.batching import CostModel, TrainSample, longest_first

Bin = list[TrainSample]
Bins = list[Bin]


def usable_tokens(max_tokens: int, pad_multiple: int) -> int:
    """Return a packed bin's capacity in tokens of samples; more exceeds the cap after padding."""
    return max_tokens // pad_multiple * pad_multiple


def rectangles(samples: Iterable[TrainSample], max_tokens: int, pad_multiple: int = 1) -> Bins:
    """Return bins of at most max_tokens, each as wide as its longest sample, padded.

    The longest sample comes first. A bin without room for one more row never has room again, so
    only the last bin can have some.
    """
    bins: Bins = []
    for sample in longest_first(samples):
        if not bins or (len(bins[-1]) + 1) * round_up(bins[-1][0].length, pad_multiple) > max_tokens:
            bins.append([])
        bins[-1].append(sample)
    return bins


def balanced(
    samples: Iterable[TrainSample], num_bins: int, capacity: int, cost: CostModel, segment_multiple: int = 1
) -> Bins | None:
    """Return num_bins bins of about equal cost, or None if the samples do not fit: the cap is hard.

    The longest sample comes first, into the cheapest bin with room for it; of equally cheap bins
    the first.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    free_room = [capacity] * num_bins
    # Heaps of (cost, bin) and (-free room, (cost, bin)). Samples get shorter: a bin that comes back
    # from the second has room for all that follow until it gets one of them. So there are no more
    # such moves than samples.
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
    """Return num_bins bins made by halving the costliest, of equal ones the first.

    Halves stand behind all others. The bins hold samples by falling length. Once every sample has
    its own bin, empty ones are added.
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
    """Return the bin in two: the longest first part of at most half of the cost, or one sample."""
    costs = _running_costs(bin_, cost)
    middle = next(i for i in range(1, len(bin_)) if 2 * costs[i] > costs[-1])
    return bin_[:middle], bin_[middle:]


def _running_costs(bin_: Bin, cost: CostModel) -> list[float]:
    """Return the cost of the first sample, of the first two, and so on."""
    return list(accumulate(cost(sample.length) for sample in bin_))

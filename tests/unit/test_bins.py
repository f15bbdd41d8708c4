"""Bins found by a heap are those of the plain definitions,
with a look at every bin for every sample."""

import math
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.data import batching, bins, tight_bins
from megatron_dapo.data.batching import CostModel, TrainSample, longest_first, shard_over_data_parallel
from megatron_dapo.data.bins import Bins, balanced, halved, rectangles
from megatron_dapo.data.tight_bins import tight
from tests.unit.test_packing import lengths_of, make_samples, round_up

pytestmark = pytest.mark.unit

MANY = settings(max_examples=300, deadline=None)
LONGEST = 24
# few different lengths, so that costs and room are often equal; or all kinds of them
LENGTHS = st.one_of(
    st.lists(st.sampled_from([1, 2, 3, 12, LONGEST]), max_size=60), st.lists(st.integers(1, LONGEST), max_size=60)
)
CAPS = st.integers(LONGEST, 80)
PAD_MULTIPLES = st.sampled_from([1, 2, 3, 4, 8])
COSTS = st.sampled_from([CostModel(1.0, 0.0), CostModel(1.0, 0.37), CostModel(1.0, 1e-5), CostModel(0.0, 1.0)])


# ------------------------------------------------------------------------- the definitions


def rectangle(lengths: list[int], pad_multiple: int) -> int:
    """Return the tokens of a micro-batch with a row per sample, padding included."""
    return len(lengths) * round_up(max(lengths), pad_multiple)


def total_cost(samples: list[TrainSample], cost: CostModel) -> float:
    """Return the costs added one after the other, with the program's rounding
    in every version of Python."""
    total = 0.0
    for sample in samples:
        total += cost(sample.length)
    return total


def plain_rectangles(samples: list[TrainSample], max_tokens: int, pad_multiple: int) -> Bins:
    """Return bins: the longest sample first, each in the first bin that stays under the cap."""
    result: Bins = []
    for sample in longest_first(samples):
        for bin_ in result:
            if rectangle(lengths_of([*bin_, sample]), pad_multiple) <= max_tokens:
                bin_.append(sample)
                break
        else:
            result.append([sample])
    return result


def plain_balanced(samples: list[TrainSample], num_bins: int, capacity: int, cost: CostModel) -> Bins | None:
    """Return bins: the longest sample first, each in the cheapest bin with room; None if no bin has
    room for one."""
    result: Bins = [[] for _ in range(num_bins)]
    for sample in longest_first(samples):
        with_room = [bin_ for bin_ in result if sum(lengths_of(bin_)) + sample.length <= capacity]
        if not with_room:
            return None
        # of equal ones the first
        min(with_room, key=lambda bin_: total_cost(bin_, cost)).append(sample)
    return result


def plain_halved(whole: Bins, num_bins: int, cost: CostModel) -> Bins:
    """Return bins: again and again the costliest (the first of equals) gives way to two
    at the list's end.

    Its first samples, one at least, go to the first of the two, up to half of the cost.
    """
    result = list(whole)
    while len(result) < num_bins:
        divisible = [place for place, bin_ in enumerate(result) if len(bin_) > 1]
        if not divisible:
            result.append([])
            continue
        costliest = result.pop(max(divisible, key=lambda place: total_cost(result[place], cost)))
        middle = 1
        while 2 * total_cost(costliest[: middle + 1], cost) <= total_cost(costliest, cost):
            middle += 1
        result += [costliest[:middle], costliest[middle:]]
    return result


def plain_shards(samples: list[TrainSample], dp_size: int, cost: CostModel) -> Bins:
    """Return shards: the longest sample first, each to the rank with the least cost,
    of equal ones the first."""
    result: Bins = [[] for _ in range(dp_size)]
    for sample in longest_first(samples):
        min(result, key=lambda shard: total_cost(shard, cost)).append(sample)
    return result


def ids(result: Bins | None) -> list[list[int]] | None:
    return result and [[sample.sample_id for sample in bin_] for bin_ in result]


# ----------------------------------------------------------------------- as they are defined


@MANY
@given(LENGTHS, CAPS, PAD_MULTIPLES)
def test_every_sample_is_in_the_first_rectangle_with_room(lengths, max_tokens, pad_multiple):
    samples = make_samples(lengths)
    result = rectangles(samples, max_tokens, pad_multiple)
    assert ids(result) == ids(plain_rectangles(samples, max_tokens, pad_multiple))
    assert sorted(sample.sample_id for bin_ in result for sample in bin_) == list(range(len(lengths)))
    assert all(rectangle(lengths_of(bin_), pad_multiple) <= max_tokens for bin_ in result)


@MANY
@given(LENGTHS, CAPS, st.integers(0, 3), COSTS)
def test_every_sample_is_in_the_cheapest_bin_with_room(lengths, capacity, more, cost):
    """In the number of bins that the samples need, or a few more: with few of them it does not
    always work out."""
    samples = make_samples(lengths)
    num_bins = len(tight(samples, capacity)) + more
    result = balanced(samples, num_bins, capacity, cost)
    assert ids(result) == ids(plain_balanced(samples, num_bins, capacity, cost))
    if result is not None:
        assert sorted(sample.sample_id for bin_ in result for sample in bin_) == list(range(len(lengths)))
        assert all(sum(lengths_of(bin_)) <= capacity for bin_ in result)


@MANY
@given(LENGTHS, CAPS, st.sampled_from([rectangles, tight]), st.integers(0, 30), COSTS)
def test_the_costliest_bins_are_halved(lengths, max_tokens, way, more, cost):
    samples = make_samples(lengths)
    whole = way(samples, max_tokens)
    result = halved(whole, len(whole) + more, cost)
    assert ids(result) == ids(plain_halved(whole, len(whole) + more, cost))
    assert len(result) == len(whole) + more
    assert sorted(sample.sample_id for bin_ in result for sample in bin_) == list(range(len(lengths)))


@MANY
@given(LENGTHS, st.integers(1, 9), COSTS)
def test_every_sample_goes_to_the_rank_with_the_least(lengths, dp_size, cost):
    samples = make_samples(lengths)
    assert ids(shard_over_data_parallel(samples, dp_size, cost)) == ids(plain_shards(samples, dp_size, cost))


# --------------------------------------------------------------------------------- by hand


def test_unpacked_bins_count_the_rectangle():
    bins = rectangles(make_samples([5, 5, 2, 2, 2]), 12)
    assert [lengths_of(bin_) for bin_ in bins] == [[5, 5], [2, 2, 2]]
    padded = rectangles(make_samples([5, 5, 2, 2, 2]), 16, pad_multiple=4)
    assert [lengths_of(bin_) for bin_ in padded] == [[5, 5], [2, 2, 2]]  # rows of 8, then of 4


def test_a_bin_without_room_for_one_sample_gets_a_shorter_one():
    # The costs are squares. 5 + 4 is cheaper than 7, but has no room for the 3; for the 1 it has.
    result = balanced(make_samples([7, 5, 4, 3, 1]), 2, 10, CostModel(0.0, 1.0))
    assert [lengths_of(bin_) for bin_ in result] == [[7, 3], [5, 4, 1]]


def test_a_sample_without_room_anywhere_is_not_put_over_the_cap():
    assert balanced(make_samples([6, 5, 4, 3, 2]), 2, 10, CostModel()) is None


# ---------------------------------------------------------------------------------- growth


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of the modules it runs, a loop's as often as they run."""
    files = {batching.__file__, bins.__file__, tight_bins.__file__}
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object):
        nonlocal num_lines
        if frame.f_code.co_filename not in files:
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines


def packed_bins(samples: list[TrainSample]) -> None:
    tight(samples, 3 * LONGEST)


def rows(samples: list[TrainSample]) -> None:
    rectangles(samples, 3 * LONGEST)


def even_bins(samples: list[TrainSample]) -> None:
    """Fill bins of 10 with 7 + 3 and 5 + 4 + 1. By squares 5 + 4 is set aside for every 3 and comes
    back for the 1."""
    same_number = make_samples([(7, 5, 4, 3, 1)[i % 5] for i in range(len(samples))])
    assert balanced(same_number, 2 * math.ceil(len(samples) / 5), 10, CostModel(0.0, 1.0)) is not None


def halves_down_to_single_samples(samples: list[TrainSample]) -> None:
    halved([longest_first(samples)], len(samples), CostModel())


def shards(samples: list[TrainSample]) -> None:
    shard_over_data_parallel(samples, len(samples) // 8)


@pytest.mark.parametrize("work", [packed_bins, rows, even_bins, halves_down_to_single_samples, shards])
def test_the_work_grows_as_n_log_n(work):
    """Four times the samples need at most four times the steps, each deeper by the logarithm;
    quadratic is sixteen."""
    few, many = 128, 512
    samples = make_samples([1 + 7 * i % LONGEST for i in range(many)])
    growth = many / few * math.log(many) / math.log(few)
    assert lines_run(lambda: work(samples)) <= growth * lines_run(lambda: work(samples[:few]))

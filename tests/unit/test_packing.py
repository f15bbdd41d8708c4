"""Promises of the micro-batch schedule and of the tensors made from it."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.batching import CostModel, TrainSample, assemble, shard_over_data_parallel
from megatron_dapo.data.bins import rectangles, usable_tokens
from megatron_dapo.data.packing import MicroBatch, collate, schedule, schedule_shards
from megatron_dapo.data.tight_bins import tight
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

QUICK = settings(max_examples=150, deadline=None)
DAPO_LIKE_LENGTHS = np.clip(np.random.default_rng(0).lognormal(8.2, 0.9, 512), 64, 20480).astype(int).tolist()


def make_sample(sample_id: int, length: int, num_prompt: int = 1, uid: str = "g") -> TrainSample:
    """Tokens, log-probs and advantage tell which sample and which place they come from."""
    written = np.zeros(length, dtype=np.float32)
    written[num_prompt - 1 : length - 1] = 1
    return TrainSample(
        sample_id=sample_id,
        uid=uid,
        tokens=1000 * (sample_id + 1) + np.arange(length),
        loss_mask=written,
        rollout_log_probs=-written * (sample_id + 1),
        advantage=float(sample_id + 1),
        weight_versions=(1000 * sample_id + 100 + np.arange(length)) * written.astype(np.int64),
    )


def make_samples(lengths: list[int]) -> list[TrainSample]:
    return [make_sample(i, length) for i, length in enumerate(lengths)]


def round_up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple


def lengths_of(bin_: list[TrainSample]) -> list[int]:
    return [sample.length for sample in bin_]


LAYOUTS = st.fixed_dictionaries(
    {
        "dp_size": st.integers(1, 5),
        "max_tokens": st.integers(24, 80),
        "pad_multiple": st.sampled_from([1, 2, 4, 8]),
        "packed": st.booleans(),
        "num_microbatches_multiple": st.integers(1, 3),
    }
).map(lambda layout: layout | {"segment_multiple": min(2, layout["pad_multiple"])})
LENGTHS = st.lists(st.integers(1, 24), max_size=40)


def cut_of(layout: dict) -> dict:
    return {name: layout[name] for name in ("pad_multiple", "segment_multiple", "packed")}


@QUICK
@given(LENGTHS, LAYOUTS)
def test_every_sample_is_scheduled_exactly_once(lengths, layout):
    plan = schedule(make_samples(lengths), **layout)
    seen = sorted(sample.sample_id for rank in plan for bin_ in rank for sample in bin_)
    assert seen == list(range(len(lengths)))


@QUICK
@given(LENGTHS, LAYOUTS)
def test_no_micro_batch_exceeds_the_cap_padding_included(lengths, layout):
    for rank in schedule(make_samples(lengths), **layout):
        for bin_ in rank:
            batch = collate(bin_, **cut_of(layout))
            assert batch.tokens.numel() <= layout["max_tokens"]
            assert batch.tokens.size(1) % layout["pad_multiple"] == 0


@QUICK
@given(LENGTHS, LAYOUTS)
def test_all_ranks_have_the_same_number_of_micro_batches(lengths, layout):
    plan = schedule(make_samples(lengths), **layout)
    assert len(plan) == layout["dp_size"]
    (number,) = {len(rank) for rank in plan}
    assert number >= 1 and number % layout["num_microbatches_multiple"] == 0
    # No more than the worst rank needs.
    capacity = usable_tokens(layout["max_tokens"], layout["pad_multiple"])
    sizes = [
        len(tight(sum(rank, []), capacity, layout["segment_multiple"]))
        if layout["packed"]
        else len(rectangles(sum(rank, []), layout["max_tokens"], layout["pad_multiple"]))
        for rank in plan
    ]
    assert number == round_up(max(1, *sizes), layout["num_microbatches_multiple"])


@QUICK
@given(LENGTHS, LAYOUTS)
def test_a_dummy_stands_only_where_samples_are_lacking(lengths, layout):
    for rank in schedule(make_samples(lengths), **layout):
        assert sum(not bin_ for bin_ in rank) == max(0, len(rank) - sum(map(len, rank)))


@QUICK
@given(LENGTHS, LAYOUTS, st.randoms(use_true_random=False))
def test_the_schedule_does_not_depend_on_the_order_of_arrival(lengths, layout, rng):
    samples = make_samples(lengths)
    shuffled = rng.sample(samples, len(samples))
    ids = [[[s.sample_id for s in bin_] for bin_ in rank] for rank in schedule(samples, **layout)]
    assert ids == [[[s.sample_id for s in bin_] for bin_ in rank] for rank in schedule(shuffled, **layout)]


@QUICK
@given(LENGTHS, LAYOUTS, st.integers(0, 3))
def test_a_second_cut_leaves_every_sample_on_its_rank(lengths, layout, offset):
    """Shards of any balance, under the cap; and of the first cut's own shards the same bins."""
    samples, cut = make_samples(lengths), {name: value for name, value in layout.items() if name != "dp_size"}
    shards = [
        [s for s in samples if (s.sample_id + offset) // 2 % layout["dp_size"] == r] for r in range(layout["dp_size"])
    ]
    plan = schedule_shards(shards, **cut)
    (number,) = {len(rank) for rank in plan}
    assert number % layout["num_microbatches_multiple"] == 0
    for rank, shard in zip(plan, shards, strict=True):
        assert sorted(s.sample_id for bin_ in rank for s in bin_) == [s.sample_id for s in shard]
        sizes = [collate(b, **cut_of(layout)).tokens.numel() for b in rank]
        assert max(sizes) <= layout["max_tokens"]
    first = schedule(samples, **layout)
    assert schedule_shards([sum(rank, []) for rank in first], **cut) == first


def test_a_full_rank_keeps_its_tight_bins_when_balancing_does_not_fit():
    # Greedy balance in 2 bins of 10: 6 | 5, then 5+4 | 6+3, and 2 fits nowhere. Tight: 6+4 | 5+3+2.
    (plan,) = schedule(make_samples([6, 5, 4, 3, 2]), dp_size=1, max_tokens=10)
    assert [lengths_of(bin_) for bin_ in plan] == [[6, 4], [5, 3, 2]]


@pytest.mark.parametrize("dp_size", [1, 4, 8, 16])
def test_log_normal_lengths_need_no_more_micro_batches_than_their_tokens(dp_size):
    """First-fit-decreasing needs one more at 1 and 4 ranks."""
    cap = 22528
    shards = shard_over_data_parallel(make_samples(DAPO_LIKE_LENGTHS), dp_size, CostModel(1.0, 1e-5))
    plan = schedule_shards(shards, max_tokens=cap, pad_multiple=8)
    assert len(plan[0]) == -(-sum(DAPO_LIKE_LENGTHS) // (dp_size * cap))


@pytest.mark.parametrize("seed", range(3))
def test_bins_of_many_samples_are_filled_but_for_one(seed):
    lengths = np.clip(np.random.default_rng(seed).lognormal(8.2, 0.9, 2048), 64, 20480).astype(int).tolist()
    assert len(tight(make_samples(lengths), 22528)) <= -(-sum(lengths) // 22528) + 1


@QUICK
@given(LENGTHS, st.integers(24, 60), st.integers(1, 4), st.randoms(use_true_random=False))
def test_tight_bins_hold_every_sample_once_under_the_cap_whatever_the_order(lengths, capacity, multiple, rng):
    capacity = round_up(capacity, multiple)
    samples = make_samples(lengths)
    bins = tight(samples, capacity, multiple)
    assert sorted(sample.sample_id for bin_ in bins for sample in bin_) == list(range(len(lengths)))
    assert all(0 < sum(round_up(sample.length, multiple) for sample in bin_) <= capacity for bin_ in bins)
    rng.shuffle(samples)
    assert tight(samples, capacity, multiple) == bins


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([6, 5, 5, 4], [[6, 4], [5, 5]]),  # one length, then two alike
        ([6, 5, 4], [[6, 4], [5]]),  # no pair of one sample
        ([9, 8, 5, 3, 2, 2, 1], [[9, 1], [8, 2], [5, 3, 2]]),
        ([10, 7, 3, 3, 2, 2, 2, 1], [[10], [7, 3], [3, 2, 2, 2, 1]]),
    ],
)
def test_tight_bins_by_hand(lengths, bins):
    assert [lengths_of(bin_) for bin_ in tight(make_samples(lengths), 10)] == bins


def all_ways(lengths: list[int], capacity: int, filled: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield, for each way to put the lengths into bins beside the `filled` ones,
    the bins' contents."""
    if not lengths:
        yield filled
        return
    first, *others = lengths
    for place, held in enumerate(filled):
        if held + first <= capacity:
            yield from all_ways(others, capacity, (*filled[:place], held + first, *filled[place + 1 :]))
    yield from all_ways(others, capacity, (*filled, first))


@QUICK
@given(st.lists(st.integers(1, 24), max_size=8), st.integers(24, 60))
def test_tight_bins_of_few_samples_are_the_fewest_possible_or_one_more(lengths, capacity):
    fewest = min(map(len, all_ways(lengths, capacity)))
    assert fewest <= len(tight(make_samples(lengths), capacity)) <= fewest + 1


def test_the_number_of_micro_batches_counts_the_padding():
    # 5 + 4 = 9 is padded to 12, over the cap of 11.
    assert len(schedule(make_samples([5, 4]), dp_size=1, max_tokens=11, pad_multiple=4)[0]) == 2


def test_balancing_counts_the_padding():
    # The cap of 11 holds 8 tokens in multiples of 4. Balanced by length only, a micro-batch would
    # have 9, padded 12.
    (plan,) = schedule(make_samples([5, 4, 3, 2, 2]), dp_size=1, max_tokens=11, pad_multiple=4)
    assert [lengths_of(bin_) for bin_ in plan] == [[5, 3], [4, 2, 2]]


def test_more_bins_than_needed_halve_the_costliest():
    # The second rank needs no more than one rectangle of 2x4, but the first needs two.
    plan = schedule(make_samples([8, 4, 4, 4, 4]), dp_size=2, max_tokens=8, packed=False)
    assert [[lengths_of(bin_) for bin_ in rank] for rank in plan] == [[[8], [4]], [[4, 4], [4]]]
    (alone,) = schedule(make_samples([4, 4]), dp_size=1, max_tokens=8, packed=False, num_microbatches_multiple=4)
    assert [lengths_of(bin_) for bin_ in alone] == [[4], [4], [], []]


def test_a_sample_over_the_cap_is_refused_with_length_and_key():
    samples = make_samples([3, 17])
    with pytest.raises(UserError) as error:
        schedule(samples, dp_size=2, max_tokens=16)
    assert "17 tokens" in str(error.value)
    assert "actor_rollout_ref.actor.max_tokens_per_microbatch=16" in str(error.value)
    with pytest.raises(UserError, match="raise it to at least 20"):
        schedule(samples, dp_size=2, max_tokens=18, pad_multiple=4)
    schedule(samples, dp_size=2, max_tokens=17)


@pytest.mark.parametrize("dp_size, cap, bound", [(4, 65536, 1.02), (16, 65536, 1.05), (8, 40960, 1.1)])
def test_cost_is_balanced_over_ranks_and_micro_batches(dp_size, cap, bound):
    cost = CostModel(1.0, 1e-5)
    plan = schedule(make_samples(DAPO_LIKE_LENGTHS), dp_size=dp_size, max_tokens=cap, pad_multiple=8, cost=cost)
    per_bin = np.array([[sum(cost(s.length) for s in bin_) for bin_ in rank] for rank in plan])
    assert per_bin.sum(axis=1).max() / per_bin.sum(axis=1).mean() < 1.01
    assert per_bin.max() / per_bin.mean() < bound
    naive = tight(make_samples(DAPO_LIKE_LENGTHS), cap)
    naive_costs = np.array([sum(cost(s.length) for s in bin_) for bin_ in naive])
    assert naive_costs.max() / naive_costs.mean() > per_bin.max() / per_bin.mean()


def test_the_costliest_micro_batch_comes_first():
    cost = CostModel()
    for rank in schedule(make_samples([9, 1, 1, 9, 3, 8, 2]), dp_size=2, max_tokens=10, cost=cost):
        totals = [sum(lengths_of(bin_)) for bin_ in rank]
        assert totals == sorted(totals, reverse=True)


# ------------------------------------------------------------------------------------------ tensors


@QUICK
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=6), st.sampled_from([1, 2, 8]), st.booleans())
def test_targets_are_the_next_tokens_of_the_same_sample(shapes, pad_multiple, packed):
    samples = [make_sample(i, p + r, num_prompt=p) for i, (p, r) in enumerate(shapes)]
    batch = collate(samples, pad_multiple=pad_multiple, packed=packed)
    seen = 0
    for row in range(batch.tokens.size(0)):
        for t in range(batch.tokens.size(1)):
            if not batch.loss_mask[row, t]:
                continue
            seen += 1
            token, target = int(batch.tokens[row, t]), int(batch.targets[row, t])
            assert target == token + 1 == int(batch.tokens[row, t + 1])
            assert batch.segment_ids[row, t] == batch.segment_ids[row, t + 1]
            assert batch.advantages[row, t] == token // 1000 == -batch.rollout_log_probs[row, t]
            assert batch.weight_versions[row, t] == token - 900  # its own, token by token
    assert seen == batch.num_counted == sum(r for _, r in shapes)


@pytest.mark.parametrize("packed", [True, False])
def test_the_last_token_of_a_segment_predicts_nothing_and_the_first_is_no_target(packed):
    """From groups, as the trainer makes them: labels are shifted inside each segment."""
    samples = assemble(synthetic_groups(60, num_groups=3), normalize_by_std=True, filter_truncated=False)
    batch = collate(samples, pad_multiple=8, packed=packed)
    starts = range(batch.num_segments)
    first = [(batch.segment_ids == i).flatten().nonzero()[0].item() for i in starts]
    last = [(batch.segment_ids == i).flatten().nonzero()[-1].item() for i in starts]
    tokens, targets, counts = batch.tokens.flatten(), batch.targets.flatten(), batch.loss_mask.flatten()
    assert not counts[last].any() and not targets[last].any()
    inside = [t for t in range(tokens.numel()) if t not in last]
    assert torch.equal(targets[inside], tokens[[t + 1 for t in inside]])
    assert not set(first) & {t + 1 for t in inside} and counts.sum() == sum(s.loss_mask.sum() for s in samples) > 0


@QUICK
@given(st.lists(st.integers(1, 9), max_size=6), st.sampled_from([1, 2, 8]))
def test_cu_seqlens_cover_all_tokens_without_empty_segments(lengths, pad_multiple):
    batch = collate(make_samples(lengths), pad_multiple=pad_multiple)
    offsets = batch.cu_seqlens.tolist()
    assert batch.is_packed and batch.cu_seqlens.dtype == torch.int32
    assert offsets[0] == 0 and offsets[-1] == batch.tokens.numel() == round_up(max(1, sum(lengths)), pad_multiple)
    widths = np.diff(offsets)
    assert (widths > 0).all() and len(widths) == batch.num_segments and batch.max_seqlen == widths.max()
    assert widths[: len(lengths)].tolist() == lengths
    for segment, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        assert (batch.segment_ids[0, start:end] == segment).all()


def test_a_packed_micro_batch_by_hand():
    batch = collate([make_sample(0, 3, num_prompt=2), make_sample(1, 2)], pad_multiple=4)
    assert batch.tokens.tolist() == [[1000, 1001, 1002, 2000, 2001, 0, 0, 0]]
    assert batch.targets.tolist() == [[1001, 1002, 0, 2001, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [[0, -1, 0, -2, 0, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert (batch.sample_ids, batch.lengths, batch.num_segments) == ((0, 1), (3, 2), 3)


def test_a_rectangle_by_hand():
    batch = collate([make_sample(0, 3, num_prompt=2), make_sample(1, 2)], pad_multiple=4, packed=False)
    assert batch.tokens.tolist() == [[1000, 1001, 1002, 0], [2000, 2001, 0, 0]]
    assert batch.targets.tolist() == [[1001, 1002, 0, 0], [2001, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[0] * 4, [1] * 4]
    assert batch.cu_seqlens is None and not batch.is_packed and (batch.num_segments, batch.max_seqlen) == (2, 4)


@pytest.mark.parametrize("packed", [True, False])
def test_a_dummy_has_one_segment_and_no_loss(packed):
    batch = collate([], pad_multiple=4, packed=packed)
    assert batch.tokens.shape == (1, 4) and batch.num_segments == 1 and batch.max_seqlen == 4
    assert not batch.loss_mask.any() and batch.num_counted == 0 and batch.sample_ids == ()
    assert batch.by_sample(batch.tokens) == {}


@pytest.mark.parametrize("packed", [True, False])
def test_values_travel_between_different_cuts_by_sample_id(packed):
    samples = make_samples([3, 5, 2])
    first = collate(samples[:2], pad_multiple=4, packed=packed)
    other = collate([samples[1], samples[2], samples[0]], pad_multiple=8, packed=not packed)
    by_sample = first.by_sample(first.rollout_log_probs) | collate(samples[2:]).by_sample(samples_of(samples[2]))
    assert {i: len(row) for i, row in by_sample.items()} == {0: 3, 1: 5, 2: 2}
    assert torch.equal(other.from_samples(by_sample), other.rollout_log_probs)


def samples_of(sample: TrainSample) -> torch.Tensor:
    return torch.from_numpy(sample.rollout_log_probs)[None]


def test_log_probs_are_added_without_touching_the_rest():
    batch = collate(make_samples([3, 2]))
    old, ref = torch.rand(1, 5), torch.rand(1, 5)
    assert batch.old_log_probs is None and batch.ref_log_probs is None
    filled = batch.with_log_probs(old=old).with_log_probs(ref=ref)
    assert filled.old_log_probs is old and filled.ref_log_probs is ref and filled.tokens is batch.tokens


@pytest.mark.parametrize("packed", [True, False])
def test_no_place_of_a_micro_batch_is_left_as_the_memory_was(packed, monkeypatch):
    empty = np.empty

    def dirty(shape, dtype=float):
        array = empty(shape, dtype)
        array.fill(99)
        return array

    samples = make_samples([5, 3, 4])
    cut = {"pad_multiple": 8, "segment_multiple": 2, "packed": packed}
    clean = [collate(part, **cut) for part in (samples, [])]
    monkeypatch.setattr(np, "empty", dirty)
    for batch, expected in zip([collate(part, **cut) for part in (samples, [])], clean, strict=True):
        padding = torch.ones_like(batch.tokens, dtype=torch.bool).view(-1)
        for _, start, length in batch._spans():
            padding[start : start + length] = False
        for name in ("tokens", "targets", "loss_mask", "advantages", "rollout_log_probs", "weight_versions"):
            assert not getattr(batch, name).view(-1)[padding].any(), name
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        assert not batch.exp_mask.any()


def test_all_tensors_move_together():
    batch: MicroBatch = collate(make_samples([3, 2])).with_log_probs(old=torch.zeros(1, 5)).to("meta")
    assert {x.device.type for x in vars(batch).values() if isinstance(x, torch.Tensor)} == {"meta"}
    assert batch.sample_ids == (0, 1) and batch.ref_log_probs is None

"""Promises of the way from groups to mini-batches and data-parallel shards."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import ESTIMATORS, estimators_with
from megatron_dapo.data.batching import (
    CostModel,
    assemble,
    group_estimates,
    mini_batches,
    sample_rewards,
    shard_over_data_parallel,
)
from megatron_dapo.data.packing import collate, schedule
from megatron_dapo.data.samples import Group, Prompt, Sample

pytestmark = pytest.mark.unit


def make_group(uid: str, rewards: list[float], prompt=(1, 2), response_length: int = 3, **changes) -> Group:
    def sample(i: int, reward: float) -> Sample:
        length = response_length + i
        return Sample(
            uid=uid,
            prompt_tokens=tuple(prompt),
            response_tokens=tuple(range(10, 10 + length)),
            rollout_log_probs=tuple(-0.1 * (k + 1) for k in range(length)),
            loss_mask=(1,) * length,
            weight_versions=(4,) * (length - 1) + (3,),
            finish_reason="stop",
            raw_reward=reward,
            correct=reward > 0,
            reward=reward,
            is_truncated=False,
        )

    prompt_row = Prompt(0, uid, tuple(prompt), "", "test", "")
    return Group(uid, prompt_row, tuple(replace(sample(i, r), **changes) for i, r in enumerate(rewards)))


def test_a_sample_is_aligned_to_the_position_that_predicts():
    group = make_group("a", [1.0], prompt=(1, 2, 3), loss_mask=(1, 0, 1))
    (sample,) = assemble([group])
    assert sample.tokens.tolist() == [1, 2, 3, 10, 11, 12]
    # token 3 predicts 10, token 11 predicts 12
    assert sample.loss_mask.tolist() == [0, 0, 1, 0, 1, 0]
    np.testing.assert_allclose(sample.rollout_log_probs, [0, 0, -0.1, -0.2, -0.3, 0], rtol=1e-6)
    assert sample.weight_versions.tolist() == [0, 0, 4, 4, 3, 0]
    assert sample.length == 6 and sample.uid == "a"
    dtypes = (sample.tokens.dtype, sample.loss_mask.dtype, sample.weight_versions.dtype)
    assert dtypes == (np.int32, np.uint8, np.int32)


def test_one_version_that_wrote_a_whole_response_is_said_once():
    (sample,) = assemble([make_group("a", [1.0], prompt=(1, 2, 3), weight_versions=(4, 4, 4))])
    assert sample.weight_versions.tolist() == [4] and sample.weight_versions.dtype == np.int32
    batch = collate([sample], pad_multiple=8)
    assert batch.weight_versions[0, batch.loss_mask[0] != 0].tolist() == [4, 4, 4]


def test_an_empty_response_counts_for_nothing():
    empty = dict(response_tokens=(), rollout_log_probs=(), loss_mask=(), weight_versions=())
    (sample,) = assemble([make_group("a", [1.0], prompt=(1, 2), **empty)])
    assert sample.tokens.tolist() == [1, 2] and not sample.loss_mask.any() and sample.weight_versions.tolist() == [0, 0]


def test_advantages_compare_within_the_group_only():
    samples = assemble([make_group("a", [1, 0, 0]), make_group("b", [5, 6])])
    std_a, std_b = np.std([1, 0, 0], ddof=1), np.std([5, 6], ddof=1)
    expected = [2 / 3 / std_a, -1 / 3 / std_a, -1 / 3 / std_a, -0.5 / std_b, 0.5 / std_b]
    np.testing.assert_allclose([s.advantage for s in samples], expected, rtol=1e-5)
    assert [s.sample_id for s in samples] == [0, 1, 2, 3, 4]
    plain = assemble([make_group("a", [1, 0, 0])], normalize_by_std=False)
    np.testing.assert_allclose([s.advantage for s in plain], [2 / 3, -1 / 3, -1 / 3])


def test_advantages_use_shaped_rewards():
    samples = assemble([make_group("a", [1.0, 1.0], raw_reward=1.0)])
    assert [s.advantage for s in samples] == [0.0, 0.0]
    group = make_group("a", [1.0, 0.5])
    raw_equal = replace(group, samples=tuple(replace(s, raw_reward=1.0) for s in group.samples))
    assert assemble([raw_equal])[0].advantage > 0.5


def test_equal_rewards_have_no_advantage_despite_rounding():
    samples = assemble([make_group("a", [0.1] * 7)])
    assert max(abs(s.advantage) for s in samples) < 1e-9


def test_new_rewards_give_new_advantages():
    rewards = sample_rewards([make_group("a", [1, 0]), make_group("b", [0, 1])])
    lowered = {i: earned._replace(reward=earned.reward - 2.0 * i) for i, earned in rewards.items()}
    again = group_estimates(lowered, "grpo", normalize_by_std=False)
    assert again == pytest.approx({0: 1.5, 1: -1.5, 2: 0.5, 3: -0.5})


def test_every_estimator_compares_with_what_its_paper_says():
    groups = [replace(make_group("a", [3, 1, 2]), baseline_reward=1.5), make_group("b", [7])]
    groups[1] = replace(groups[1], baseline_reward=9.0)
    by_name = {name: [s.advantage for s in assemble(groups, estimator=name)] for name in ESTIMATORS}
    assert by_name["grpo"] == pytest.approx(
        [1, -1, 0, 7], rel=1e-5
    )  # std of 1, 2, 3 is 1; a group of one: mean 0, std 1
    assert by_name["rloo"] == pytest.approx([1.5, -1.5, 0, 7])  # minus the mean of the others
    assert by_name["remax"] == pytest.approx([1.5, -0.5, 0.5, -2])
    assert by_name["maxrl"] == pytest.approx([0.5, -0.5, 0, 0])  # by the mean of 2; alone one is the mean
    assert {advantage for name in estimators_with(per_token=True) for advantage in by_name[name]} == {0.0}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused_by_group(estimator, bad):
    fine = replace(make_group("a", [1, 0]), baseline_reward=0.0)
    with pytest.raises(UserError, match=f"group b has the reward {bad}.*reward.function"):
        assemble([fine, replace(make_group("b", [1.0, bad]), baseline_reward=0.0)], estimator=estimator)


def test_remax_without_a_greedy_answer_is_refused_by_group():
    with pytest.raises(UserError, match="Group a has no reward of a greedy answer.*remax"):
        assemble([make_group("a", [1, 0])], estimator="remax")
    with pytest.raises(UserError, match="reward nan"):
        assemble([replace(make_group("a", [1, 0]), baseline_reward=float("nan"))], estimator="remax")


def test_a_negative_reward_is_refused_by_an_estimator_that_divides_by_the_mean():
    with pytest.raises(UserError, match="group b has the reward -0.5.*maxrl, which divides.*wrong answers 0"):
        assemble([make_group("a", [1, 0]), make_group("b", [1.0, -0.5])], estimator="maxrl")
    advantages = [sample.advantage for sample in assemble([make_group("a", [1, 0, 0])], estimator="maxrl")]
    assert advantages == pytest.approx([2, -1, -1])


def test_truncated_responses_lose_their_loss_but_stay_in_the_statistics():
    group = make_group("a", [1.0, 0.0])
    cut = replace(group, samples=(group.samples[0], replace(group.samples[1], is_truncated=True)))
    kept, filtered = assemble([cut]), assemble([cut], filter_truncated=True)
    assert [s.advantage for s in kept] == [s.advantage for s in filtered]
    assert [int(s.loss_mask.sum()) for s in kept] == [3, 4]
    assert [int(s.loss_mask.sum()) for s in filtered] == [3, 0]


def test_a_sample_without_prompt_or_with_ragged_columns_is_an_assertion():
    with pytest.raises(AssertionError, match="prompt"):
        assemble([make_group("a", [1.0], prompt=())])
    with pytest.raises(AssertionError, match="lengths"):
        assemble([make_group("a", [1.0], loss_mask=(1,))])


# ------------------------------------------------------------------------------------- mini-batches


def groups_of(num_groups: int) -> list[Group]:
    return [make_group(f"g{i}", [1.0, 0.0], response_length=1 + i % 5) for i in range(num_groups)]


@given(st.integers(1, 12), st.integers(1, 5), st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3)))
@settings(max_examples=80, deadline=None)
def test_mini_batches_keep_groups_whole_and_lose_nothing(num_groups, per_mini_batch, seed):
    samples = assemble(groups_of(num_groups))
    parts = mini_batches(samples, per_mini_batch, seed)
    assert sorted(s.sample_id for part in parts for s in part) == list(range(2 * num_groups))
    uids = [{s.uid for s in part} for part in parts]
    sizes = [len(u) for u in uids]
    assert len(sizes) == -(-num_groups // per_mini_batch) and max(sizes) <= per_mini_batch
    assert max(sizes) - min(sizes) <= 1  # no optimizer step on a lone left-over group
    assert sum(len(u) for u in uids) == num_groups == len(set().union(*uids))


def test_mini_batches_follow_the_seed_alone():
    samples = assemble(groups_of(12))
    ids = [[[s.sample_id for s in part] for part in mini_batches(samples, 4, seed)] for seed in (None, "1-7", "1-7", 2)]
    assert ids[0] == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]
    assert ids[1] == ids[2] and ids[1] != ids[0] and ids[1] != ids[3]


def test_mini_batch_membership_does_not_depend_on_the_layout():
    samples = assemble(groups_of(12))
    for part in mini_batches(samples, 4, seed=1):
        expected = sorted(s.sample_id for s in part)
        for dp_size in (1, 2, 3, 4):
            plan = schedule(part, dp_size=dp_size, max_tokens=32, pad_multiple=dp_size)
            assert sorted(s.sample_id for rank in plan for bin_ in rank for s in bin_) == expected


# ------------------------------------------------------------------------------------------- shards


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 6), st.sampled_from([0.0, 0.01, 1.0]))
@settings(max_examples=80, deadline=None)
def test_shards_are_balanced_within_one_sample(lengths, dp_size, quadratic):
    cost = CostModel(1.0, quadratic)
    base = assemble([make_group("a", [1.0])])[0]
    samples = [replace(base, sample_id=i, tokens=np.zeros(n, dtype=np.int64)) for i, n in enumerate(lengths)]
    shards = shard_over_data_parallel(samples, dp_size, cost)
    assert sorted(s.sample_id for shard in shards for s in shard) == list(range(len(lengths)))
    loads = [sum(cost(s.length) for s in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(cost(n) for n in lengths) * (1 + 1e-9)
    best = max(max(cost(n) for n in lengths), sum(cost(n) for n in lengths) / dp_size)
    assert max(loads) <= (2 - 1 / dp_size) * best * (1 + 1e-9)  # bound of greedy scheduling


def test_cost_of_a_decoder_is_its_multiply_adds():
    # Qwen2.5-32B: 64 layers share the ratio; per layer 487.6 M weights, attention 40 heads x 128.
    cost = CostModel.of_decoder(
        hidden_size=5120, ffn_size=27648, attention_weights=5120 * 128 * 2 * (40 + 8), attention_width=40 * 128
    )
    weights = 5120 * 5120 * 2 + 5120 * 1024 * 2 + 3 * 5120 * 27648
    assert cost.linear == 1.0 and cost.quadratic == pytest.approx(5120 / weights)
    assert cost(20000) == pytest.approx(20000 + 20000**2 * 5120 / weights)


def test_quadratic_cost_changes_who_gets_what():
    base = assemble([make_group("a", [1.0])])[0]
    samples = [replace(base, sample_id=i, tokens=np.zeros(n, dtype=np.int64)) for i, n in enumerate([6, 3, 3, 3])]
    by_length = shard_over_data_parallel(samples, 2, CostModel(1.0, 0.0))
    by_square = shard_over_data_parallel(samples, 2, CostModel(0.0, 1.0))
    assert [len(shard) for shard in by_length] == [2, 2] and [len(shard) for shard in by_square] == [1, 3]

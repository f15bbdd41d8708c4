"""Groups without signal: found by correctness or by the spread of a metric, replaced or masked."""

import asyncio
import json
import logging
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.algorithms.policy_loss import Clip, policy_loss
from megatron_dapo.algorithms.whitening import moments
from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import SampleReward, assemble, group_estimates, sample_rewards
from megatron_dapo.data.packing import collate
from megatron_dapo.queue.group_filter import FILTER_MODES, by_correctness, by_spread, filter_in_words, make_queue
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.step_metrics import step_metrics
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.distribute import StepShard
from tests.fake_rollout import RIGHT, WRONG, FakeServer, Script, make_config, write_files
from tests.unit.test_batching import make_group
from tests.unit.test_dynamic_sampling import MIXED, indices, run_gen_batch
from tests.unit.test_dynamic_sampling import RIGHT as ALL_RIGHT
from tests.unit.test_dynamic_sampling import WRONG as ALL_WRONG

pytestmark = pytest.mark.unit

DAPO = ["algorithm.dynamic_sampling.enable=true", "data.train_batch_size=3"]
MASK = [*DAPO, "algorithm.dynamic_sampling.form=mask"]
GROUPS = ["data.train_batch_size=2", "algorithm.filter_groups.enable=true"]


@pytest.mark.parametrize(
    ("correct", "raw_reward", "reward", "dropped_by"),
    [
        ((True, False), (1.0, 0.0), (1.0, 0.0), set()),
        ((True, True), (1.0, 1.0), (1.0, 1.0), {"acc", "score", "seq_reward", "seq_final_reward"}),
        # all wrong, of different lengths: only the shaped reward tells them apart
        ((False, False), (0.0, 0.0), (0.0, -0.5), {"acc", "score"}),
        # partial credit: right by none, told apart by the verifier's score, made equal by shaping
        ((False, False), (0.5, 0.0), (0.0, 0.0), {"acc", "seq_reward", "seq_final_reward"}),
        # equal numbers with a computed deviation other than 0
        ((False, False, False), (0.1,) * 3, (0.1,) * 3, {"acc", "score", "seq_reward", "seq_final_reward"}),
        ((True,), (1.0,), (1.0,), set()),  # a group of one passes
    ],
)
def test_a_group_is_dropped_where_its_metric_has_no_spread(correct, raw_reward, reward, dropped_by):
    group = make_group("a", list(reward))
    samples = [
        replace(sample, correct=right, raw_reward=raw)
        for sample, right, raw in zip(group.samples, correct, raw_reward, strict=True)
    ]
    metrics = ("acc", "score", "seq_reward", "seq_final_reward")
    reasons = {metric: by_spread(metric)(samples) for metric in metrics}
    assert {metric for metric, reason in reasons.items() if reason == "uniform"} == dropped_by
    assert {reason for metric, reason in reasons.items() if metric not in dropped_by} <= {None}


def test_filter_groups_samples_again_until_the_batch_is_full_and_counts_its_reason():
    queue = make_queue(load_config(None, [*GROUPS, "data.gen_batch_size=3"]))
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [ALL_RIGHT, MIXED, ALL_WRONG])
    assert not queue.is_ready()
    run_gen_batch(queue, 3, [MIXED, MIXED, ALL_WRONG])
    result = queue.take()
    assert indices(result.groups) == [1, 3] and result.num_discarded == 1
    metrics = step_metrics(result, weight_version=1, num_retries=0, seconds=1.0)
    assert metrics["dapo/num_filtered_samples"] == 6 and metrics["dapo/filter_ratio"] == 0.5
    assert metrics["dapo/filtered_uniform"] == 3 and metrics["dapo/num_kept_groups"] == 3


@pytest.mark.parametrize(("limit", "rounds"), [(2, 2), (0, 25), (-1, 25)])
def test_filter_groups_stops_at_its_limit_and_never_where_the_limit_is_not_positive(limit, rounds):
    queue = make_queue(load_config(None, [*GROUPS, f"algorithm.filter_groups.max_num_gen_batches={limit}"]))
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED, ALL_WRONG])
    for number in range(1, rounds):
        assert not queue.is_ready()
        run_gen_batch(queue, 2 * number, [ALL_WRONG, ALL_RIGHT])
    if limit > 0:  # trains on all there is
        assert queue.is_ready() and indices(queue.take().groups) == [0]
    else:
        assert not queue.is_ready()


def test_masked_groups_stay_in_their_places_and_are_counted_as_filtered():
    queue = make_queue(load_config(None, MASK))
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [ALL_RIGHT, MIXED, ALL_WRONG])
    assert queue.is_ready()  # one gen batch, of any contents
    state = from_bytes(to_bytes(queue.state_dict()))
    result = queue.take()
    assert indices(result.groups) == [0, 1, 2] and [group.keep for group in result.groups] == [False, True, False]
    metrics = step_metrics(result, weight_version=1, num_retries=0, seconds=1.0)
    expected = {
        "dapo/num_gen_batches": 1, "dapo/num_kept_groups": 1, "dapo/num_filtered_groups": 2,
        "dapo/num_filtered_samples": 4, "dapo/filter_ratio": 4 / 6, "dapo/filtered_all_correct": 1,
        "dapo/filtered_all_incorrect": 1, "rollout/num_groups": 3, "train/accuracy": 0.5,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected

    other = make_queue(load_config(None, MASK))
    other.load_state_dict(state)
    other.begin(2, weight_version=1)
    assert other.take().groups == result.groups


def test_the_advantages_of_a_masked_group_are_0_and_its_tokens_still_count():
    """Groups of 3 + 4 tokens. Kept: A = +-1/sqrt(2). Masked: shaped rewards that differ would have
    given the same. Token-mean at ratio 1: -(3 - 4) / sqrt(2) over 14 tokens, not over 7."""
    groups = [make_group("a", [1.0, 0.0]), replace(make_group("b", [0.0, -0.5]), keep=False)]
    samples = assemble(groups)
    root = 2**-0.5
    assert [sample.advantage for sample in samples] == pytest.approx([root, -root, 0.0, 0.0], rel=1e-5)
    batch = collate(samples)
    weights, count = token_weights("token-mean", batch.loss_mask, batch.segment_ids, batch.num_segments, 8)
    log_probs = torch.zeros_like(batch.advantages)
    loss = policy_loss(log_probs, log_probs, batch.advantages, weights, count, Clip())
    assert int(count) == 14
    assert float(loss.loss_sum) / int(count) == pytest.approx(-(3 - 4) * root / 14, rel=1e-5)


def test_a_masked_group_stays_at_0_when_the_group_is_estimated_again():
    outcomes = {
        0: SampleReward("a", 1.0, True, 1, 1),
        1: SampleReward("a", 0.0, False, 1, 1),
        2: SampleReward("b", 1.0, True, 1, 1, keep=False),
        3: SampleReward("b", 0.0, False, 1, 1, keep=False),
    }
    assert group_estimates(outcomes, "grpo", normalize_by_std=False) == {0: 0.5, 1: -0.5, 2: 0.0, 3: 0.0}


def test_estimates_per_token_are_masked_after_they_were_whitened(monkeypatch):
    """Discounted returns with gamma 1 are the reward at every token: 3 x 1, 4 x 0, 3 x 0, 4 x -1 in
    all. The moments are those of the whole step, masked groups included."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    groups = [make_group("a", [1.0, 0.0]), replace(make_group("b", [0.0, -1.0]), keep=False)]
    samples = assemble(groups, estimator="reinforce_plus_plus")
    shard = StepShard([[collate(samples)]], sample_rewards(groups))
    config = load_config(None, ["algorithm.adv_estimator=reinforce_plus_plus"])
    layout = SimpleNamespace(is_last_stage=True, counts_tokens=True)
    shard, metrics = estimate_advantages(shard, None, config, layout)
    (batch,) = shard.mini_batches[0]
    returns = torch.tensor([1.0] * 3 + [0.0] * 7 + [-1.0] * 4, dtype=torch.float64)
    mean, std = returns.mean(), returns.std()  # unbiased
    expected = torch.cat([(returns[:7] - mean) / std, torch.zeros(7)])
    assert batch.advantages[batch.loss_mask != 0].double() == pytest.approx(expected, rel=1e-6)
    assert batch.returns[batch.loss_mask != 0].double() == pytest.approx(returns)
    assert metrics["actor/advantage_mean"] == pytest.approx(float(mean))
    assert moments(batch.advantages, batch.loss_mask != 0)[0] == 14


def test_the_controller_masks_and_says_how_many_samples_were_filtered(tmp_path, monkeypatch, caplog):
    write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = Script({0: RIGHT, 2: WRONG})

    async def batch():
        server = await FakeServer(script).start()
        controller = Controller(
            make_config(tmp_path, [server], "algorithm.dynamic_sampling.form=mask", "trainer.dump_batches=true")
        )
        try:
            await controller.start()
            return await controller.next_batch(1, 1)
        finally:
            await controller.close()
            await server.stop()

    try:
        with caplog.at_level(logging.INFO, "megatron_dapo.rollout.controller"):
            groups = asyncio.run(batch()).groups
    finally:
        sys.modules.pop("fake_rewards", None)
    assert [group.keep for group in groups] == [False, True, False, True]
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    assert [json.loads(line).get("masked", False) for line in lines] == [True, False, True, False]
    lines = [record.getMessage() for record in caplog.records if "Dynamic Sampling" in record.getMessage()]
    assert lines == ["DAPO Dynamic Sampling: Filtered 4 samples with strict mode"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*DAPO, "algorithm.dynamic_sampling.filter_mode=remove_all_correct"], "remove_all_correct mode"),
        ([*GROUPS, "algorithm.filter_groups.metric=score"], "score mode"),
    ],
)
def test_the_log_says_how_groups_are_filtered(overrides, words):
    assert filter_in_words(load_config(None, overrides)) == words


@given(st.lists(st.booleans(), min_size=1, max_size=16))
def test_a_group_is_filtered_where_its_success_rate_is_0_or_1(correct):
    samples = [SimpleNamespace(correct=right) for right in correct]
    success_rate = statistics.fmean(correct)
    filtered = {mode for mode in FILTER_MODES if by_correctness(mode)(samples) is not None}
    expected = {"strict"} if success_rate in (0.0, 1.0) else set()
    expected |= {"remove_all_correct"} if success_rate == 1.0 else set()
    expected |= {"remove_all_incorrect"} if success_rate == 0.0 else set()
    assert filtered == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (DAPO, "on  (strict, at most 10 gen batches)"),
        (MASK, "on  (strict, by advantages of 0)"),
        ([*GROUPS, "algorithm.filter_groups.max_num_gen_batches=0"], "on  (spread of acc, any number of gen batches)"),
        ([*GROUPS, "algorithm.filter_groups.metric=score"], "on  (spread of score, at most 10 gen batches)"),
        ([], "off"),
    ],
)
def test_the_process_plan_says_which_form_is_on(overrides, words):
    (line,) = [line for line in process_plan(load_config(None, overrides)).splitlines() if "dynamic sampling" in line]
    assert line.partition("dynamic sampling")[2].replace("on   ", "on  ").strip() == words

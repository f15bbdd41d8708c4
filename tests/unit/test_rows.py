"""A trajectory of several branches: one reward and one advantage, a row of the trainer per branch."""

import gzip
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.agents.credit import load_credit
from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.checkpointing.rollout_state import num_tokens_under_way
from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import estimators_with
from megatron_dapo.data.batching import TrainSample, assemble, mini_batches, sample_rewards
from megatron_dapo.data.flat_pickle import flat_pickle, from_flat_pickle
from megatron_dapo.data.packing import collate
from megatron_dapo.data.samples import Branch, Group, Prompt, RolloutBatch, Sample, drop_experts
from megatron_dapo.queue.group_queue import staleness
from megatron_dapo.queue.plain_data import draw_from_plain, draw_to_plain, group_from_plain, group_to_plain
from megatron_dapo.queue.step_statistics import RolloutStep, StepStatistics
from megatron_dapo.rollout.answer_records import group_record
from megatron_dapo.rollout.batch_files import read_batch, write_batch
from megatron_dapo.rollout.batch_replay import BatchReplay
from megatron_dapo.rollout.step_metrics import row_metrics, step_metrics
from megatron_dapo.storage.run_folder import batch_file
from megatron_dapo.telemetry import performance
from tests.synthetic import synthetic_groups, with_branches

pytestmark = pytest.mark.unit

LONGEST = 8


def branch(mask: list[int], *, prompt: int = 2, version: int = 3, first: int = 10) -> dict:
    """The fields of a branch with a response of these masks; its experts are one per token."""
    length = len(mask)
    return dict(
        prompt_tokens=np.arange(1, prompt + 1, dtype=np.int32),
        response_tokens=np.arange(first, first + length, dtype=np.int32),
        rollout_log_probs=-np.array(mask, dtype=np.float32),
        loss_mask=np.array(mask, dtype=np.uint8),
        weight_versions=np.full(length, version, dtype=np.int32),
        routed_experts=np.arange(prompt + length - 1, dtype=np.uint8),
    )


def trajectory(reward: float, masks: list[list[int]], uid: str = "g", **fields) -> Sample:
    first, *others = (branch(mask, prompt=2 + place, first=10 * (place + 1)) for place, mask in enumerate(masks))
    verdict = dict(finish_reason="stop", raw_reward=reward, correct=reward > 0, reward=reward, is_truncated=False)
    return Sample(uid=uid, **first, **verdict | fields, others=tuple(Branch(**other) for other in others))


def group(*samples: Sample, uid: str = "g") -> Group:
    return Group(uid, Prompt(0, "key", (1, 2), "", "source", ""), samples)


@pytest.fixture
def three_rows() -> Group:
    return group(trajectory(1.0, [[1, 0, 1], [0, 0, 1, 1], [1]], own_answer="a patch"), trajectory(0.0, [[1, 1]]))


def advantages_of(rows: list[TrainSample]) -> list[float]:
    return [round(row.advantage, 4) for row in rows]


# ---------------------------------------------------------------------------------- records


def test_a_trajectory_counts_its_written_tokens_once_and_is_as_long_as_its_longest_branch(three_rows):
    sample, _ = three_rows.samples
    assert sample.num_written_tokens == 2 + 2 + 1 and sample.num_response_tokens == 4
    assert [row.num_tokens for row in sample.branches] == [5, 7, 5]


def test_files_and_states_hold_every_branch(tmp_path, three_rows):
    plain = from_bytes(to_bytes(group_to_plain(three_rows)))
    assert group_from_plain(plain) == three_rows
    assert draw_from_plain(from_bytes(to_bytes(draw_to_plain(three_rows)))) == three_rows
    assert from_flat_pickle(flat_pickle(three_rows)) == three_rows
    batch = RolloutBatch((three_rows,), {})
    write_batch(tmp_path, 1, batch)
    assert read_batch(tmp_path, 1) == batch
    assert gzip.decompress(batch_file(tmp_path, 1).read_bytes()).count(b'"routed_experts": "uint8 ') == 4
    # open groups of a stopped run: 3 + 4 + 1, and 2
    assert num_tokens_under_way({"queue": {"open": [draw_to_plain(three_rows)]}}) == 10


def test_a_response_of_one_branch_is_kept_as_before_there_were_branches(tmp_path):
    [whole] = synthetic_groups(67, num_groups=1)
    assert not any("others" in sample for sample in group_to_plain(whole)["samples"])
    assert group_from_plain(group_to_plain(whole)) == whole


def test_a_branch_that_no_model_can_have_written_is_refused_with_its_place(tmp_path, three_rows):
    def refused(**changes) -> str:
        sample = three_rows.samples[0]
        bad = replace(sample, others=(sample.others[0], replace(sample.others[1], **changes)))
        write_batch(tmp_path, 1, RolloutBatch((replace(three_rows, samples=(three_rows.samples[1], bad)),), {}))
        with pytest.raises(UserError) as error:
            BatchReplay(tmp_path, vocab_size=67).next_batch(1, 0)
        return str(error.value)

    place = "group g, sample 2 has"
    assert f"{place} the token id 99, outside the model's vocabulary of 67 (branch 3 of 3)" in refused(
        response_tokens=(99,)
    )
    assert f"{place} the token id -1, outside" in refused(prompt_tokens=(-1,))
    assert f"{place} the log-prob 2, which no sampled token can have (branch 3 of 3)" in refused(
        rollout_log_probs=(2.0,)
    )
    assert f"{place} [1, 2] tokens in its response, loss mask" in refused(loss_mask=(1, 1))


def test_a_file_with_branches_of_another_form_is_refused_in_one_sentence(tmp_path, three_rows):
    write_batch(tmp_path, 1, RolloutBatch((three_rows,), {}))
    path = batch_file(tmp_path, 1)
    text = gzip.decompress(path.read_bytes()).decode()
    for wrong in ("7", '"text"', '[{"a": 1}]', "[null]"):
        plain = json.loads(text)
        plain["groups"][0]["samples"][0]["others"] = json.loads(wrong)
        path.write_bytes(gzip.compress(json.dumps(plain).encode()))
        with pytest.raises(UserError, match="cannot be read"):
            read_batch(tmp_path, 1)


def test_the_experts_of_all_branches_are_let_go(three_rows):
    alone = replace(three_rows.samples[0], routed_experts=np.zeros(0, np.uint8))  # only further branches have some
    groups = [replace(three_rows, samples=(alone,))]
    drop_experts(groups)
    [kept] = groups[0].samples
    assert not any(len(row.routed_experts) for row in kept.branches) and len(kept.branches) == 3
    assert not any(
        np.shares_memory(a.loss_mask, b.loss_mask) for a, b in zip(kept.branches, alone.branches, strict=True)
    )


def test_people_see_the_first_prompt_whole_and_the_ends_of_the_others(three_rows):
    """The prompts of many turns, each with all turns before it, would take most of a file."""
    long = replace(three_rows.samples[0], **branch([1], prompt=5000), others=(Branch(**branch([1], prompt=5000)),))
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: " ".join(str(int(token)) for token in tokens))
    shown = group_record(1, replace(three_rows, samples=(long,)), tokenizer)["responses"][0]["branches"]
    assert [one["prompt"].split()[0] for one in shown] == ["1", "2953"]
    assert [len(one["prompt"].split()) for one in shown] == [5000, 2048]


# ------------------------------------------------------------------------------- advantages


def test_advantages_compare_trajectories_and_not_rows():
    """Of four, two are right: the mean is 1/2, the deviation 1/sqrt(3). With rows as members the
    right ones' four of seven would give 0.80 and -1.07."""
    right, wrong = trajectory(1.0, [[1], [1], [1]]), trajectory(0.0, [[1], [1]])
    rows = assemble([group(right, wrong, trajectory(1.0, [[1]]), trajectory(0.0, [[1]]))])
    assert [row.sample_id for row in rows] == list(range(7))
    assert advantages_of(rows) == [0.866] * 3 + [-0.866] * 2 + [0.866, -0.866]


@pytest.mark.parametrize("estimator", estimators_with(per_token=False))
def test_every_estimator_gives_a_row_the_advantage_of_its_trajectory(estimator):
    """Rewards of 0.9 at least: one of them divides by their mean."""
    groups = [replace(each, baseline_reward=0.3) for each in synthetic_groups(67, num_groups=4)]
    groups = [replace(g, samples=tuple(replace(s, reward=s.reward + 1) for s in g.samples)) for g in groups]
    cut = with_branches(groups)
    rows = iter(assemble(cut, estimator=estimator))
    whole = assemble(groups, estimator=estimator)
    samples = [sample for each in cut for sample in each.samples]
    assert len({len(sample.branches) for sample in samples}) > 2
    for sample, one in zip(samples, whole, strict=True):
        assert [next(rows).advantage for _ in sample.branches] == [one.advantage] * len(sample.branches)
    assert next(rows, None) is None


def test_the_rewards_of_a_step_are_keyed_by_their_first_rows(three_rows):
    rewards = sample_rewards([three_rows, group(trajectory(0.5, [[1], [1]]), uid="h")])
    assert [(first, one.reward, len(one.factors)) for first, one in rewards.items()] == [
        (0, 1.0, 3),
        (3, 0.0, 1),
        (4, 0.5, 2),
    ]
    assert (rewards[0].num_tokens, rewards[0].num_counted) == (4, 5)


@pytest.mark.parametrize("estimator", estimators_with(per_token=True))
def test_an_estimate_per_token_of_several_branches_is_refused(three_rows, estimator):
    with pytest.raises(UserError, match=f"has 3 branches, but algorithm.adv_estimator is {estimator}"):
        assemble([three_rows], estimator=estimator)


def test_all_rows_of_a_truncated_trajectory_lose_their_loss(three_rows):
    cut = replace(three_rows.samples[0], is_truncated=True)
    rows = assemble([replace(three_rows, samples=(cut, three_rows.samples[1]))], filter_truncated=True)
    assert [int(row.loss_mask.sum()) for row in rows] == [0, 0, 0, 2]
    weights, count = weighed("seq-mean-token-mean", rows)
    assert count == 1 and float(weights.sum()) == 1.0


def test_the_rows_of_a_trajectory_share_their_mini_batch(three_rows):
    groups = [three_rows, *(group(trajectory(1.0, [[1], [1]], uid), uid=uid) for uid in "abc")]
    parts = mini_batches(assemble(groups), 2, seed=1)
    assert [len({row.uid for row in part}) for part in parts] == [2, 2]
    assert sorted(row.sample_id for part in parts for row in part) == list(range(10))


# ------------------------------------------------------------------------------ aggregation


def weighed(mode: str, rows: list[TrainSample], packed: bool = True):
    batch = collate(rows, packed=packed, pad_multiple=4)
    segments = (batch.loss_mask, batch.segment_ids, batch.num_segments, LONGEST, torch.float64)
    return token_weights(mode, *segments, num_elsewhere=batch.num_elsewhere, stands=batch.stands)


MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
FORESTS = st.lists(
    st.lists(st.tuples(st.floats(-1, 2), st.lists(MASKS, min_size=1, max_size=4)), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


def halving(sample: Sample) -> list[float]:
    """A branch counts half of the one before it."""
    return [0.5**place for place in range(len(sample.branches))]


def by_the_formula(groups: list[Group], mode: str, credit) -> float:
    """The loss of a mini-batch, from its trajectories: a token's is its advantage times its id."""
    total, num_tokens, num_trajectories = 0.0, 0, 0
    for each in groups:
        rewards = [sample.reward for sample in each.samples]
        std = statistics.stdev(rewards) if len(rewards) > 1 else 1.0
        mean = statistics.fmean(rewards) if len(rewards) > 1 else 0.0
        for sample in each.samples:
            advantage = (sample.reward - mean) / (std + 1e-6)
            length = sum(int(row.loss_mask.sum()) for row in sample.branches)
            weight = {"seq-mean-token-mean": 1 / max(length, 1), "seq-mean-token-sum-norm": 1 / LONGEST}.get(mode, 1.0)
            for factor, row in zip(credit(sample), sample.branches, strict=True):
                for token, counted in zip(row.response_tokens.tolist(), row.loss_mask.tolist(), strict=True):
                    total += counted * weight * factor * advantage * token
            num_tokens += length
            num_trajectories += length > 0
    return total / max(num_tokens if mode == "token-mean" else num_trajectories, 1)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(forest=FORESTS, data=st.data())
def test_the_loss_is_that_of_the_formula_in_every_order_and_cut(mode, forest, data):
    groups = [
        group(*(trajectory(reward, masks, uid) for reward, masks in members), uid=uid)
        for uid, members in zip("abc", forest, strict=False)
    ]
    rows = data.draw(st.permutations(assemble(groups, credit=halving)))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=6))
    packed = data.draw(st.booleans())
    loss, count, start = 0.0, 0, 0
    for size in [*sizes, len(rows)]:  # the last micro-batch has all the rest; some have none
        part, start = rows[start : start + size], start + size
        batch = collate(part, packed=packed, pad_multiple=4)
        weights, number = weighed(mode, part, packed)
        loss += float((weights * batch.advantages.double() * batch.targets).sum())
        count += int(number)
    assert loss / max(count, 1) == pytest.approx(by_the_formula(groups, mode, halving), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_of_ordinary_responses_are_the_same_to_the_bit(mode):
    """As they are without any knowledge of trajectories."""
    batch = collate(assemble(synthetic_groups(67)), pad_multiple=4)
    plain = (mode, batch.loss_mask, batch.segment_ids, batch.num_segments, 24)
    for ours, expected in zip(
        token_weights(*plain, num_elsewhere=batch.num_elsewhere, stands=batch.stands),
        token_weights(*plain),
        strict=True,
    ):
        assert torch.equal(ours, expected) and ours.dtype == expected.dtype


def test_a_trajectory_counts_at_its_first_row_with_counted_tokens():
    rows = assemble([group(trajectory(1.0, [[0, 0], [1], [1, 1]]))])
    assert [row.num_elsewhere for row in rows] == [3, 2, 1]
    assert [int(weighed("seq-mean-token-mean", [row])[1]) for row in rows] == [0, 1, 0]
    assert sum(float(weighed("seq-mean-token-mean", [row])[0].sum()) for row in rows) == pytest.approx(1.0)


# ----------------------------------------------------------------------------------- credit


@pytest.fixture
def credits(tmp_path: Path, monkeypatch):
    """Return the credit of a module with this body of a function of `trajectory`."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(body: str, name: str):
        (tmp_path / f"{name}.py").write_text(f"def share(trajectory):\n    {body}\n")
        return load_credit(f"{name}:share")

    return made


def test_credit_multiplies_the_advantages_of_branches_and_leaves_the_count(three_rows, credits):
    last = credits("return [0.5] * (len(trajectory.branches) - 1) + [2 * trajectory.raw_reward]", "credit_last")
    rows = assemble([three_rows], credit=last)
    assert advantages_of(rows) == [0.3536, 0.3536, 1.4142, 0.0]
    assert [int(weighed("token-mean", [row])[1]) for row in rows] == [2, 2, 1, 2]
    assert sample_rewards([three_rows], last)[0].factors == (0.5, 0.5, 2.0)


def test_without_a_function_all_branches_have_the_whole_advantage(three_rows):
    assert advantages_of(assemble([three_rows], credit=None)) == [0.7071] * 3 + [-0.7071]


@pytest.mark.parametrize(
    "number, body, said",
    [
        (
            0,
            "return [1.0]",
            "must return 3 finite numbers (one per branch) for a trajectory of group g; it returned [1.0]",
        ),
        (1, "return [1, 1, 1, 1]", "must return 3 finite numbers"),
        (2, "return [1, 2, float('nan')]", "it returned [1, 2, nan]"),
        (3, "return [1, 2, 1e999]", "must return 3 finite numbers"),
        (
            4,
            "return None",
            "must return 3 finite numbers (one per branch) for a trajectory of group g; it returned None",
        ),
        (5, "return ['a'] * 3", "must return 3 finite numbers"),
        (6, "return 1 / 0", "failed for a trajectory of group g (ZeroDivisionError: division by zero)"),
        (7, "import itertools; return itertools.count()", "must return 3 finite numbers"),
        (8, "return {0: 1.0, 1: 1.0, 2: 1.0}", "must return 3 finite numbers"),
    ],
)
def test_an_unusable_answer_of_credit_is_told_in_one_sentence(three_rows, credits, number, body, said):
    with pytest.raises(UserError) as error:
        assemble([three_rows], credit=credits(body, f"credit_{number}"))
    [sentence] = error.value.sentences
    assert sentence.startswith(f"actor_rollout_ref.rollout.agent.credit: credit_{number}:share ") and said in sentence


def test_credit_that_is_no_function_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="agent.credit: 'math:pi' is no function but float"):
        load_credit("math:pi")
    with pytest.raises(UserError, match="agent.credit: cannot import 'no_such_module:share'"):
        load_credit("no_such_module:share")


# ---------------------------------------------------------------------------------- metrics


def test_metrics_of_a_step_are_of_trajectories_and_of_all_their_branches(three_rows):
    first, other = three_rows.samples
    older = replace(first, others=(first.others[0], replace(first.others[1], weight_versions=np.array([1]))))
    changed = replace(three_rows, samples=(older, other))
    generated = StepStatistics()
    generated.add(changed)
    step = RolloutStep(1, generated=generated, groups=(changed,))
    metrics = step_metrics(step, weight_version=3, num_retries=0, seconds=1.0)
    assert metrics["rollout/num_tokens"] == 5 + 2 and metrics["response_length/mean"] == (4 + 2) / 2
    assert metrics["train/reward_mean"] == 0.5 and generated.num_samples == 2
    assert (metrics["rollout/staleness_max"], metrics["rollout/version_span_max"]) == (2, 2)
    assert metrics["rollout/staleness_mean"] == pytest.approx(2 / 7)
    assert staleness(changed, 3) == 2
    assert row_metrics([changed]) == {"agent/rows_mean": 2.0, "agent/rows_max": 3}
    assert row_metrics([]) == {"agent/rows_max": 0}


def test_the_work_of_the_trainer_is_that_of_all_rows(three_rows):
    metrics = performance.step_metrics([three_rows], step_s=1.0, waiting_s=0.0, num_trainer_ranks=1, num_server_ranks=0)
    assert metrics["perf/total_num_tokens"] == 5 + 7 + 5 + 4
    seen = []
    work = performance.PhaseWork(lambda spec, lengths, counted, lora: seen.append((lengths, counted)) or 1, 1, 1.0)
    performance.mfu_metrics(None, None, [three_rows], {"mfu": work}, num_gpus=1, peak=1.0)
    assert seen == [([5, 7, 5, 4], 7)] and math.isfinite(metrics["perf/throughput"])

"""Dynamic sampling's bookkeeping: exact counts, the order of groups, surplus, exhaustion, nothing lost or doubled."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config import UserError
from megatron_dapo.data.types import Group, Prompt, Sample
from megatron_dapo.rollout.group_filter import FILTER_MODES, by_correctness
from megatron_dapo.rollout.group_queue import GroupQueue, QueueLimits
from megatron_dapo.rollout.step_metrics import step_metrics

pytestmark = pytest.mark.unit

MIXED, RIGHT, WRONG = (True, False), (True, True), (False, False)


def make_queue(train=2, gen=4, max_gen=3, on_exhausted="raise", mode="strict"):
    return GroupQueue(QueueLimits(train, gen, max_gen, on_exhausted), by_correctness(mode))


def prompts(first, count):
    return [Prompt(index, f"key{index}", (1, 2), f"p{index}", "test", "0") for index in range(first, first + count)]


def make_group(draw, correct, version=1, **overrides):
    sample = dict(
        uid=draw.uid, prompt_tokens=(1, 2), response_tokens=(3, 4, 5), response_text="x", rollout_log_probs=(0.0,) * 3,
        loss_mask=(1,) * 3, weight_versions=(version,) * 3, finish_reason="stop", is_truncated=False,
    )  # fmt: skip
    samples = (
        Sample(**{**sample, "raw_reward": float(right), "reward": float(right), "correct": right, **overrides})
        for right in correct
    )
    return Group(draw.uid, draw.prompt, tuple(samples))


def run_gen_batch(queue, first, outcomes, backwards=False):
    queue.open_gen_batch(prompts(first, len(outcomes)))
    finished = [make_group(draw, outcome) for draw, outcome in zip(queue.missing(), outcomes, strict=True)]
    for group in reversed(finished) if backwards else finished:
        queue.finish(group)
    queue.close_gen_batch()


def indices(groups):
    return [group.prompt.index for group in groups]


def test_kept_filtered_and_surplus_are_counted_exactly():
    queue = make_queue(train=2, gen=6)
    queue.begin(1)
    run_gen_batch(queue, 0, [MIXED, RIGHT, MIXED, WRONG, WRONG, MIXED])
    assert not queue.wants_gen_batch()
    result = queue.take()
    assert indices(result.groups) == [0, 2]
    assert dict(result.filtered) == {"all_correct": 1, "all_incorrect": 2}
    assert queue.num_surplus == 1

    metrics = step_metrics(result, weight_version=1, num_retries=0, seconds=2.0)
    assert metrics["dapo/num_kept_groups"] == 3
    assert metrics["dapo/num_filtered_groups"] == 3
    assert metrics["dapo/num_filtered_samples"] == 6
    assert metrics["dapo/filter_ratio"] == 0.5
    assert metrics["dapo/filtered_all_correct"] == 1
    assert metrics["dapo/filtered_all_incorrect"] == 2
    assert metrics["reward/accuracy"] == pytest.approx(5 / 12)  # of all generated
    assert metrics["train/accuracy"] == 0.5  # of those trained on
    assert metrics["rollout/tokens_per_s"] == 12 * 3 / 2.0


def test_surplus_is_used_first_and_counted_in_the_next_step():
    queue = make_queue(train=2, gen=3)
    queue.begin(1)
    run_gen_batch(queue, 0, [MIXED, MIXED, MIXED])
    queue.take()
    queue.begin(2)
    assert queue.num_groups_wanted == 1
    run_gen_batch(queue, 3, [WRONG, MIXED, MIXED])
    result = queue.take()
    assert indices(result.groups) == [2, 4]
    assert result.num_surplus_used == 1
    metrics = step_metrics(result, weight_version=3, num_retries=0, seconds=1.0)
    assert metrics["rollout/num_surplus_groups_used"] == 1
    assert metrics["rollout/staleness_max"] == 2
    assert queue.num_surplus == 1


def test_a_step_filled_by_surplus_generates_nothing_and_reports_no_means_of_nothing():
    queue = make_queue(train=1, gen=3)
    queue.begin(1)
    run_gen_batch(queue, 0, [MIXED, MIXED, MIXED])
    queue.take()
    queue.begin(2)
    assert not queue.wants_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=0.1)
    assert metrics["dapo/num_gen_batches"] == 0
    assert metrics["train/reward_mean"] == 0.5
    assert "reward/mean" not in metrics and "dapo/filter_ratio" not in metrics


def test_the_order_of_groups_is_the_order_of_prompts_whoever_answers_first():
    queue = make_queue(train=4, gen=4)
    queue.begin(1)
    run_gen_batch(queue, 0, [MIXED] * 4, backwards=True)
    assert indices(queue.take().groups) == [0, 1, 2, 3]


def test_a_gen_batch_is_not_judged_before_its_last_group():
    queue = make_queue(train=1, gen=2)
    queue.begin(1)
    queue.open_gen_batch(prompts(0, 2))
    queue.finish(make_group(queue.missing()[1], MIXED))
    with pytest.raises(AssertionError):
        queue.close_gen_batch()


def test_the_filter_looks_at_correctness_not_at_shaped_rewards():
    queue = make_queue(train=1, gen=1, max_gen=1)
    queue.begin(1)
    queue.open_gen_batch(prompts(0, 1))
    (draw,) = queue.missing()
    group = make_group(draw, WRONG)
    shaped = tuple(Sample(**{**vars(sample), "reward": -0.1 * i}) for i, sample in enumerate(group.samples))
    queue.finish(Group(group.uid, group.prompt, shaped))
    queue.close_gen_batch()
    with pytest.raises(UserError, match="all_incorrect 1"):
        queue.wants_gen_batch()


def test_uniform_data_ends_with_the_reason_counts():
    queue = make_queue(train=2, gen=4, max_gen=2)
    queue.begin(7)
    run_gen_batch(queue, 0, [WRONG, WRONG, RIGHT, MIXED])
    assert queue.wants_gen_batch()
    run_gen_batch(queue, 4, [WRONG, WRONG, RIGHT, WRONG])
    with pytest.raises(UserError) as error:
        queue.wants_gen_batch()
    for part in ("max_num_gen_batches = 2", "1 of the 2 groups", "step 7", "all_correct 2", "all_incorrect 5"):
        assert part in str(error.value)


def test_train_partial_hands_over_what_there_is_but_never_nothing():
    queue = make_queue(train=2, gen=2, max_gen=1, on_exhausted="train_partial")
    queue.begin(1)
    run_gen_batch(queue, 0, [WRONG, MIXED])
    assert not queue.wants_gen_batch()
    assert indices(queue.take().groups) == [1]
    queue.begin(2)
    run_gen_batch(queue, 2, [WRONG, RIGHT])
    with pytest.raises(UserError, match="0 of the 2 groups"):
        queue.wants_gen_batch()


def test_going_on_with_an_open_step_keeps_finished_groups_and_counts():
    queue = make_queue(train=2, gen=3)
    queue.begin(1)
    run_gen_batch(queue, 0, [WRONG, WRONG, MIXED])
    queue.open_gen_batch(prompts(3, 3))
    queue.finish(make_group(queue.missing()[1], MIXED))
    queue.begin(1)
    assert [draw.prompt.index for draw in queue.missing()] == [3, 5]
    for draw in queue.missing():
        queue.finish(make_group(draw, RIGHT))
    queue.close_gen_batch()
    result = queue.take()
    assert indices(result.groups) == [2, 4]
    assert result.num_gen_batches == 2
    assert dict(result.filtered) == {"all_incorrect": 2, "all_correct": 2}


def test_truncation_counts_and_penalties():
    queue = make_queue(train=3, gen=3, mode="none")
    queue.begin(1)
    queue.open_gen_batch(prompts(0, 3))
    how = [
        dict(finish_reason="length", is_truncated=True, is_terminated=False, reward=-0.5),
        dict(finish_reason="stop", is_truncated=True, is_terminated=False, reward=-0.25),
        dict(),
    ]
    for draw, overrides in zip(queue.missing(), how, strict=True):
        queue.finish(make_group(draw, (False,), **overrides))
    queue.close_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=4, seconds=1.0)
    assert metrics["dapo/num_truncated_samples"] == 2
    assert metrics["dapo/num_truncated_by_length"] == 1
    assert metrics["dapo/num_truncated_by_termination"] == 1
    assert metrics["dapo/truncation_ratio"] == pytest.approx(2 / 3)
    assert metrics["dapo/avg_truncation_penalty_applied"] == pytest.approx(-0.25)
    assert metrics["rollout/num_retries"] == 4


def test_reward_errors_are_counted_by_kind():
    queue = make_queue(train=4, gen=4, mode="none")
    queue.begin(1)
    queue.open_gen_batch(prompts(0, 4))
    for draw, error in zip(queue.missing(), ["timeout", "crash", "exception: ValueError", None], strict=True):
        queue.finish(make_group(draw, (False,), reward_error=error))
    queue.close_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)
    assert [metrics[f"reward/num_{kind}"] for kind in ("timeouts", "crashes", "exceptions")] == [1, 1, 1]


@st.composite
def runs(draw):
    train, gen = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    max_gen, mode = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(FILTER_MODES)))
    return train, gen, max_gen, mode, draw(st.randoms(use_true_random=False)), draw(st.integers(1, 6))


@settings(max_examples=200, deadline=None)
@given(runs())
def test_every_prompt_drawn_is_used_once_filtered_once_or_surplus(run):
    """Through interruptions, saved and restored state, and steps that end early."""
    train, gen, max_gen, mode, random, num_steps = run
    queue = make_queue(train, gen, max_gen, "train_partial", mode)
    drawn, handed_out, num_filtered = 0, [], 0
    for step in range(num_steps):
        queue.begin(step)
        try:
            while queue.wants_gen_batch():
                queue.open_gen_batch(prompts(drawn, gen))
                drawn += gen
                while missing := queue.missing():
                    queue.finish(make_group(random.choice(missing), random.choice([MIXED, RIGHT, WRONG])))
                    if random.random() < 0.1:
                        queue.begin(step)
                queue.close_gen_batch()
        except UserError:
            assert queue.num_surplus == 0
            return
        result = queue.take()
        assert 1 <= len(result.groups) <= train
        assert len({group.uid for group in result.generated}) == len(result.generated)
        handed_out += indices(result.groups)
        num_filtered += sum(result.filtered.values())
        state = json.loads(json.dumps(queue.state_dict()))
        queue = make_queue(train, gen, max_gen, "train_partial", mode)
        queue.load_state_dict(state)
    assert handed_out == sorted(set(handed_out))  # once each, in the order drawn
    assert len(handed_out) + num_filtered + queue.num_surplus == drawn == queue.num_drawn


@given(st.integers(0, 3))
@settings(deadline=None, max_examples=4)
def test_state_saved_in_the_middle_of_a_gen_batch_goes_on_where_it_was(num_finished):
    queue = make_queue(train=3, gen=3)
    queue.begin(1)
    queue.open_gen_batch(prompts(0, 3))
    for draw in queue.missing()[:num_finished]:
        queue.finish(make_group(draw, MIXED))
    other = make_queue(train=3, gen=3)
    other.load_state_dict(queue.state_dict())
    other.begin(1)
    assert [draw.prompt.index for draw in other.missing()] == list(range(num_finished, 3))
    for draw in other.missing():
        other.finish(make_group(draw, MIXED))
    other.close_gen_batch()
    assert indices(other.take().groups) == [0, 1, 2]

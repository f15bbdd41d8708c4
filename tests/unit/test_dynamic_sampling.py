"""Dynamic sampling's bookkeeping: exact counts, the order of groups, surplus, exhaustion, nothing lost or doubled."""

import gc
import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.types import Group, Prompt, Sample
from megatron_dapo.rollout.group_filter import FILTER_MODES, by_correctness
from megatron_dapo.rollout.group_queue import GroupQueue, QueueLimits, staleness
from megatron_dapo.rollout.step_metrics import step_metrics

pytestmark = pytest.mark.unit

MIXED, RIGHT, WRONG = (True, False), (True, True), (False, False)


def make_queue(train=2, gen=4, max_gen=3, on_exhausted="raise", mode="strict", max_staleness=0):
    limits = QueueLimits(train, gen, max_gen, on_exhausted, max_staleness=max_staleness)
    return GroupQueue(limits, by_correctness(mode))


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


def run_gen_batch(queue, first, outcomes, backwards=False, version=1):
    queue.open_gen_batch(prompts(first, len(outcomes)))
    finished = [make_group(draw, outcome, version) for draw, outcome in zip(queue.missing(), outcomes, strict=True)]
    for group in reversed(finished) if backwards else finished:
        queue.add_finished(group)
    return queue.close_gen_batch()


def num_waiting(queue):
    """Kept groups; between two steps these are the surplus."""
    return len(queue.state_dict()["kept"])


def indices(groups):
    return [group.prompt.index for group in groups]


def test_kept_filtered_and_surplus_are_counted_exactly():
    queue = make_queue(train=2, gen=6)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED, RIGHT, MIXED, WRONG, WRONG, MIXED])
    assert not queue.wants_gen_batch()
    result = queue.take()
    assert indices(result.groups) == [0, 2]
    assert dict(result.filtered) == {"all_correct": 1, "all_incorrect": 2}
    assert num_waiting(queue) == 0

    metrics = step_metrics(result, weight_version=1, num_retries=0, seconds=2.0)
    assert metrics["dapo/num_kept_groups"] == 3
    assert metrics["rollout/num_groups"] == 2 and metrics["rollout/num_groups_discarded"] == 1
    assert metrics["dapo/num_filtered_groups"] == 3
    assert metrics["dapo/num_filtered_samples"] == 6
    assert metrics["dapo/filter_ratio"] == 0.5
    assert metrics["dapo/filtered_all_correct"] == 1
    assert metrics["dapo/filtered_all_incorrect"] == 2
    assert metrics["reward/accuracy"] == pytest.approx(5 / 12)  # of all generated
    assert metrics["train/accuracy"] == 0.5  # of those trained on
    assert metrics["rollout/tokens_per_s"] == 12 * 3 / 2.0


def test_a_step_is_trained_on_what_its_own_weights_wrote():
    """What one step has too much of is not trained on by the next, whose weights are others."""
    queue = make_queue(train=2, gen=3)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED, MIXED, MIXED])
    first = queue.take()
    assert indices(first.groups) == [0, 1] and first.num_discarded == 1
    queue.begin(2, weight_version=2)
    assert queue.num_groups_wanted == 2
    run_gen_batch(queue, 3, [WRONG, MIXED, MIXED], version=2)
    metrics = step_metrics(queue.take(), weight_version=2, num_retries=0, seconds=1.0)
    assert metrics["rollout/staleness_max"] == 0 and metrics["rollout/num_groups_discarded"] == 0


def test_surplus_is_used_first_and_counted_in_the_next_step_where_it_may_be_a_version_old():
    queue = make_queue(train=2, gen=3, max_staleness=1)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED, MIXED, MIXED])
    assert queue.take().num_discarded == 0
    queue.begin(2, weight_version=2)
    assert queue.num_groups_wanted == 1
    run_gen_batch(queue, 3, [WRONG, MIXED, MIXED], version=2)
    result = queue.take()
    assert indices(result.groups) == [2, 4]
    assert result.num_surplus_used == 1
    metrics = step_metrics(result, weight_version=2, num_retries=0, seconds=1.0)
    assert metrics["rollout/num_surplus_groups_used"] == 1
    assert metrics["rollout/staleness_max"] == 1
    assert num_waiting(queue) == 1


def test_surplus_stays_as_long_as_its_age_allows():
    queue = make_queue(train=1, gen=5, max_staleness=2)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED] * 5)
    assert [queue.take().num_discarded, num_waiting(queue)] == [0, 4]
    queue.begin(2, weight_version=2)
    assert [queue.take().num_discarded, num_waiting(queue)] == [0, 3]
    queue.begin(3, weight_version=3)
    assert [queue.take().num_discarded, num_waiting(queue)] == [2, 0]


def test_a_groups_age_is_that_of_its_oldest_new_token():
    queue = make_queue(train=1, gen=2, max_staleness=1)
    queue.begin(7, weight_version=6)
    queue.open_gen_batch(prompts(0, 2))
    mixed, replayed = (make_group(draw, MIXED, version=6) for draw in queue.missing())
    samples = (replace(mixed.samples[0], weight_versions=(6, 5, 6)), mixed.samples[1])
    queue.add_finished(replace(mixed, samples=samples))
    # a replayed sample is off-policy by design, and has a loss of its own
    borrowed = replace(replayed.samples[0], weight_versions=(1,) * 3, exp_mask=True)
    queue.add_finished(replace(replayed, samples=(borrowed, replayed.samples[1])))
    queue.close_gen_batch()
    assert staleness(replace(mixed, samples=samples), 7) == 2
    taken = queue.take()
    assert indices(taken.groups) == [0] and taken.num_discarded == 0 and num_waiting(queue) == 1


def test_groups_of_a_saved_state_that_are_too_old_are_discarded_or_sampled_again():
    """As in the checkpoints of a program that kept all surplus, or of a run that allowed more."""
    before = make_queue(train=1, gen=3, max_staleness=5)
    before.begin(4, weight_version=3)
    run_gen_batch(before, 0, [MIXED] * 3, version=3)
    before.take()
    before.open_gen_batch(prompts(3, 2))
    before.add_finished(make_group(before.missing()[0], MIXED, version=3))
    state = json.loads(json.dumps(before.state_dict()))
    del state["step"]  # unknown to that program

    queue = make_queue(train=1, gen=3)
    queue.load_state_dict(state)
    queue.begin(5, weight_version=4)
    assert num_waiting(queue) == 0 and len(queue.missing()) == 2
    for draw in queue.missing():
        queue.add_finished(make_group(draw, MIXED, version=4))
    queue.close_gen_batch()
    taken = queue.take()
    assert indices(taken.groups) == [3] and taken.num_surplus_used == 0
    assert taken.num_discarded == 3  # two that waited, and what this step had too much of


def test_a_step_holds_no_group_that_was_dropped():
    """A gen batch of long responses is gigabytes."""
    queue = make_queue(train=3, gen=4)
    queue.begin(1, weight_version=1)
    dropped = weakref.WeakSet()
    for first in (0, 4):
        judged = run_gen_batch(queue, first, [RIGHT, WRONG, MIXED, WRONG])
        dropped.update(sample for group in judged for sample in group.samples if group.prompt.index % 4 != 2)
        del judged
    gc.collect()
    assert len(dropped) == 0
    assert queue.state_dict()["step"]["generated"]["num_groups"] == 8


@given(st.integers(0, 7))
@settings(deadline=None, max_examples=8)
def test_a_step_that_goes_on_from_its_saved_state_reports_what_it_would_have_reported(num_finished):
    """Its gen batches count towards the limit, and its metrics are over all that it generated."""
    outcomes = [[WRONG, MIXED, RIGHT, WRONG], [RIGHT, WRONG, WRONG, MIXED]]

    def result(saved_after):
        queue, number = make_queue(train=2, gen=4), 0
        queue.begin(3, weight_version=1)
        for first, of_batch in zip((0, 4), outcomes, strict=True):
            queue.open_gen_batch(prompts(first, 4))
            for draw, outcome in zip(queue.missing(), of_batch, strict=True):
                if number == saved_after:
                    state = json.loads(json.dumps(queue.state_dict()))
                    queue = make_queue(train=2, gen=4)
                    queue.load_state_dict(state)
                    queue.begin(3, weight_version=1)
                queue.add_finished(make_group(draw, outcome))
                number += 1
            queue.close_gen_batch()
        assert not queue.wants_gen_batch()
        return step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)

    assert result(num_finished) == result(None)


def test_a_run_that_ended_at_the_limit_has_as_many_gen_batches_again():
    queue = make_queue(train=2, gen=2, max_gen=1)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, MIXED])
    with pytest.raises(UserError):
        queue.wants_gen_batch()
    other = make_queue(train=2, gen=2, max_gen=1)
    other.load_state_dict(queue.state_dict())
    other.begin(1, weight_version=1)
    assert other.wants_gen_batch()
    run_gen_batch(other, 2, [MIXED, WRONG])
    assert indices(other.take().groups) == [1, 2]


def test_a_step_filled_by_surplus_generates_nothing_and_reports_no_means_of_nothing():
    queue = make_queue(train=1, gen=3, max_staleness=2)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED, MIXED, MIXED])
    queue.take()
    queue.begin(2, weight_version=2)
    assert not queue.wants_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=0.1)
    assert metrics["dapo/num_gen_batches"] == 0
    assert metrics["train/reward_mean"] == 0.5
    assert "reward/mean" not in metrics and "dapo/filter_ratio" not in metrics


def test_the_order_of_groups_is_the_order_of_prompts_whoever_answers_first():
    queue = make_queue(train=4, gen=4)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED] * 4, backwards=True)
    assert indices(queue.take().groups) == [0, 1, 2, 3]


def test_a_gen_batch_is_not_judged_before_its_last_group():
    queue = make_queue(train=1, gen=2)
    queue.begin(1, weight_version=1)
    queue.open_gen_batch(prompts(0, 2))
    queue.add_finished(make_group(queue.missing()[1], MIXED))
    with pytest.raises(AssertionError):
        queue.close_gen_batch()


def test_the_filter_looks_at_correctness_not_at_shaped_rewards():
    queue = make_queue(train=1, gen=1, max_gen=1)
    queue.begin(1, weight_version=1)
    queue.open_gen_batch(prompts(0, 1))
    (draw,) = queue.missing()
    group = make_group(draw, WRONG)
    shaped = tuple(Sample(**{**vars(sample), "reward": -0.1 * i}) for i, sample in enumerate(group.samples))
    queue.add_finished(Group(group.uid, group.prompt, shaped))
    queue.close_gen_batch()
    with pytest.raises(UserError, match="all_incorrect 1"):
        queue.wants_gen_batch()


def test_uniform_data_ends_with_the_reason_counts():
    queue = make_queue(train=2, gen=4, max_gen=2)
    queue.begin(7, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, WRONG, RIGHT, MIXED])
    assert queue.wants_gen_batch()
    run_gen_batch(queue, 4, [WRONG, WRONG, RIGHT, WRONG])
    with pytest.raises(UserError) as error:
        queue.wants_gen_batch()
    for part in ("max_num_gen_batches = 2", "1 of the 2 groups", "step 7", "all_correct 2", "all_incorrect 5"):
        assert part in str(error.value)


def test_train_partial_hands_over_what_there_is_but_never_nothing():
    queue = make_queue(train=2, gen=2, max_gen=1, on_exhausted="train_partial")
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, MIXED])
    assert not queue.wants_gen_batch()
    assert indices(queue.take().groups) == [1]
    queue.begin(2, weight_version=1)
    run_gen_batch(queue, 2, [WRONG, RIGHT])
    with pytest.raises(UserError, match="0 of the 2 groups"):
        queue.wants_gen_batch()


def test_going_on_with_an_open_step_keeps_finished_groups_and_counts():
    queue = make_queue(train=2, gen=3)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, WRONG, MIXED])
    queue.open_gen_batch(prompts(3, 3))
    queue.add_finished(make_group(queue.missing()[1], MIXED))
    queue.begin(1, weight_version=1)
    assert [draw.prompt.index for draw in queue.missing()] == [3, 5]
    for draw in queue.missing():
        queue.add_finished(make_group(draw, RIGHT))
    queue.close_gen_batch()
    result = queue.take()
    assert indices(result.groups) == [2, 4]
    assert result.num_gen_batches == 2
    assert dict(result.filtered) == {"all_incorrect": 2, "all_correct": 2}


def test_truncation_counts_and_penalties():
    queue = make_queue(train=3, gen=3, mode="none")
    queue.begin(1, weight_version=1)
    queue.open_gen_batch(prompts(0, 3))
    how = [
        dict(finish_reason="length", is_truncated=True, is_terminated=False, reward=-0.5),
        dict(finish_reason="stop", is_truncated=True, is_terminated=False, reward=-0.25),
        dict(reward=-0.125),  # of the soft interval: not truncated
    ]
    for draw, overrides in zip(queue.missing(), how, strict=True):
        queue.add_finished(make_group(draw, (False,), **overrides))
    queue.close_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=4, seconds=1.0)
    assert metrics["dapo/num_truncated_samples"] == 2
    assert metrics["dapo/num_truncated_by_length"] == 1
    assert metrics["dapo/num_truncated_by_termination"] == 1
    assert metrics["dapo/truncation_ratio"] == pytest.approx(2 / 3)
    assert metrics["dapo/avg_truncation_penalty_applied"] == pytest.approx(0.375)
    assert metrics["rollout/num_retries"] == 4


def test_a_step_without_truncated_responses_has_no_mean_penalty():
    queue = make_queue(train=1, gen=1, mode="none")
    queue.begin(1, weight_version=1)
    queue.open_gen_batch(prompts(0, 1))
    queue.add_finished(make_group(queue.missing()[0], (False,), reward=-0.125))
    queue.close_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)
    assert metrics["dapo/num_truncated_samples"] == 0 and "dapo/avg_truncation_penalty_applied" not in metrics


def test_reward_errors_are_counted_by_kind():
    queue = make_queue(train=4, gen=4, mode="none")
    queue.begin(1, weight_version=1)
    queue.open_gen_batch(prompts(0, 4))
    for draw, error in zip(queue.missing(), ["timeout", "crash", "exception: ValueError", None], strict=True):
        queue.add_finished(make_group(draw, (False,), reward_error=error))
    queue.close_gen_batch()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)
    assert [metrics[f"reward/num_{kind}"] for kind in ("timeouts", "crashes", "exceptions")] == [1, 1, 1]


@st.composite
def runs(draw):
    train, gen = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    max_gen, mode = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(FILTER_MODES)))
    max_staleness = draw(st.integers(0, 3))
    make = partial(make_queue, train, gen, max_gen, "train_partial", mode, max_staleness)
    return make, draw(st.randoms(use_true_random=False)), draw(st.integers(1, 8))


def reloaded(queue, make):
    other = make()
    other.load_state_dict(json.loads(json.dumps(queue.state_dict())))
    return other


@settings(max_examples=300, deadline=None)
@given(runs())
def test_every_prompt_drawn_is_handed_out_filtered_discarded_waiting_or_open(run):
    """At every moment, through interruptions, saved and restored state, and steps that end early; and what is handed
    out is never older than it may be."""
    make, random, num_steps = run
    queue = make()
    size, max_staleness = queue.limits.train_batch_size, queue.limits.max_staleness
    drawn, handed_out, num_filtered, num_discarded = 0, [], 0, 0

    def check_accounts():
        step = queue.state_dict()["step"] or {"filtered": {}, "num_discarded": 0}
        out = len(handed_out) + num_filtered + sum(step["filtered"].values()) + num_discarded + step["num_discarded"]
        num_open = len(queue.state_dict()["open"])
        assert out + num_waiting(queue) + num_open == drawn == queue.state_dict()["num_drawn"]

    for step in range(num_steps):
        queue.begin(step, weight_version=step)
        try:
            while queue.wants_gen_batch():
                if not queue.has_open_gen_batch:
                    queue.open_gen_batch(prompts(drawn, queue.limits.gen_batch_size))
                    drawn += queue.limits.gen_batch_size
                while missing := queue.missing():
                    queue.add_finished(make_group(random.choice(missing), random.choice([MIXED, RIGHT, WRONG]), step))
                    check_accounts()
                    if random.random() < 0.1:
                        queue = reloaded(queue, make) if random.random() < 0.5 else queue
                        queue.begin(step, weight_version=step)
                queue.close_gen_batch()
                check_accounts()
        except UserError:
            assert num_waiting(queue) == 0
            return
        result = queue.take()
        assert 1 <= len(result.groups) <= size
        assert all(staleness(group, step) <= max_staleness for group in result.groups)
        handed_out += indices(result.groups)
        num_filtered += sum(result.filtered.values())
        num_discarded += result.num_discarded
        check_accounts()
        if not max_staleness:
            assert num_waiting(queue) == result.num_surplus_used == 0
        queue = reloaded(queue, make)
    assert handed_out == sorted(set(handed_out))  # once each, in the order drawn


@given(st.integers(0, 3))
@settings(deadline=None, max_examples=4)
def test_state_saved_in_the_middle_of_a_gen_batch_goes_on_where_it_was(num_finished):
    queue = make_queue(train=3, gen=3)
    queue.begin(1, weight_version=1)
    queue.open_gen_batch(prompts(0, 3))
    for draw in queue.missing()[:num_finished]:
        queue.add_finished(make_group(draw, MIXED))
    other = make_queue(train=3, gen=3)
    other.load_state_dict(queue.state_dict())
    other.begin(1, weight_version=1)
    assert [draw.prompt.index for draw in other.missing()] == list(range(num_finished, 3))
    for draw in other.missing():
        other.add_finished(make_group(draw, MIXED))
    other.close_gen_batch()
    assert indices(other.take().groups) == [0, 1, 2]

"""Dynamic sampling's bookkeeping: exact counts, order, surplus, exhaustion,
nothing lost or doubled."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits, staleness
from megatron_dapo.rollout.step_metrics import step_metrics

pytestmark = pytest.mark.unit

MIXED, RIGHT, WRONG = (True, False), (True, True), (False, False)


def make_queue(train=2, gen=4, max_gen=3, on_exhausted="raise", mode="strict", max_staleness=0, masks=False):
    limits = QueueLimits(train, gen, max_gen, on_exhausted, masks, max_staleness)
    return GroupQueue(limits, by_correctness(mode))


def prompts(first, count):
    return [Prompt(index, f"key{index}", (1, 2), f"p{index}", "test", "0") for index in range(first, first + count)]


def make_group(draw, correct, version=1, **overrides):
    sample = dict(
        uid=draw.uid, prompt_tokens=(1, 2), response_tokens=(3, 4, 5), rollout_log_probs=(0.0,) * 3,
        loss_mask=(1,) * 3, weight_versions=(version,) * 3, finish_reason="stop", is_truncated=False,
    )  # fmt: skip
    samples = (
        Sample(**{**sample, "raw_reward": float(right), "reward": float(right), "correct": right, **overrides})
        for right in correct
    )
    return Group(draw.uid, draw.prompt, tuple(samples), version=draw.version)


def draw_all(queue, first, count, version=1):
    return [queue.draw(prompt, version) for prompt in prompts(first, count)]


def run_gen_batch(queue, first, outcomes, backwards=False, version=1):
    drawn = draw_all(queue, first, len(outcomes), version)
    finished = [make_group(draw, outcome, version) for draw, outcome in zip(drawn, outcomes, strict=True)]
    for group in reversed(finished) if backwards else finished:
        queue.add_finished(group)
    return queue.decide()


def unfinished(queue):
    return [group for group in queue.open_groups if not queue.is_finished(group.uid)]


def indices(groups):
    return [group.prompt.index for group in groups]


def test_kept_filtered_and_surplus_are_counted_exactly():
    queue = make_queue(train=2, gen=6)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED, RIGHT, MIXED, WRONG, WRONG, MIXED])
    assert queue.is_ready()
    result = queue.take()
    assert indices(result.groups) == [0, 2]
    assert dict(result.filtered) == {"all_correct": 1, "all_incorrect": 2}
    assert queue.num_ready == 0

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
    """The next step has other weights: it does not train on this one's surplus."""
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


def test_groups_that_are_ready_are_the_next_steps_where_they_may_be_a_version_old():
    queue = make_queue(train=2, gen=3, max_staleness=1)
    queue.begin(1, weight_version=0)
    run_gen_batch(queue, 0, [MIXED, MIXED, MIXED], version=0)
    assert queue.take().num_discarded == 0 and queue.num_ready == 1
    run_gen_batch(queue, 3, [WRONG], version=0)  # while the trainer trains
    queue.begin(2, weight_version=1)
    assert queue.num_groups_wanted == 1 and not queue.is_ready()
    run_gen_batch(queue, 4, [MIXED, MIXED], version=1)
    result = queue.take()
    assert indices(result.groups) == [2, 4] and result.filtered == {"all_incorrect": 1}
    metrics = step_metrics(result, weight_version=1, num_retries=0, seconds=1.0)
    assert metrics["rollout/num_groups_ready"] == 1
    assert metrics["rollout/staleness_max"] == 1 and metrics["rollout/staleness_mean"] == 0.5
    assert metrics["rollout/num_groups_discarded"] == 0 and queue.num_ready == 1


def test_the_age_of_what_is_trained_on_is_that_of_its_new_tokens():
    queue = make_queue(train=2, gen=2, max_staleness=2)
    queue.begin(8, weight_version=7)
    mixed, replayed = (make_group(draw, MIXED, version=6) for draw in draw_all(queue, 0, 2, version=5))
    # an environment's words have no age
    turns = dict(weight_versions=(5, 6, 7), loss_mask=(1, 0, 1))
    queue.add_finished(replace(mixed, samples=(replace(mixed.samples[0], **turns), mixed.samples[1])))
    # a replayed sample is off-policy by design, and has a loss of its own
    borrowed = replace(replayed.samples[0], weight_versions=(1,) * 3, exp_mask=True)
    queue.add_finished(replace(replayed, samples=(borrowed, replayed.samples[1])))
    queue.decide()
    taken = queue.take()
    metrics = step_metrics(taken, weight_version=7, num_retries=0, seconds=1.0)
    assert metrics["rollout/staleness_max"] == staleness(taken.groups[0], 7) == 2
    assert metrics["rollout/staleness_mean"] == (2 + 0 + 6 * 1) / 8
    assert metrics["rollout/version_span_max"] == 2
    assert staleness(taken.groups[1], 7) == 1


def test_groups_of_a_saved_state_that_are_too_old_are_discarded_or_sampled_again():
    """As in the checkpoint of a run that allowed more."""
    before = make_queue(train=1, gen=3, max_staleness=5)
    before.begin(4, weight_version=3)
    run_gen_batch(before, 0, [MIXED] * 3, version=3)
    before.take()
    draw_all(before, 3, 2, version=3)
    before.add_finished(make_group(before.open_groups[1], MIXED, version=3))
    before.add_sample(make_group(before.open_groups[0], MIXED, version=3).samples[0])
    state = from_bytes(to_bytes(before.state_dict()))

    queue = make_queue(train=1, gen=3)
    queue.load_state_dict(state)
    queue.begin(5, weight_version=4)
    assert queue.num_ready == 0
    assert [queue.renew(draw.uid, 4).version for draw in unfinished(queue)] == [4, 4]
    assert not any(draw.samples for draw in unfinished(queue))
    for draw in unfinished(queue):
        queue.add_finished(make_group(draw, MIXED, version=4))
    queue.decide()
    taken = queue.take()
    assert indices(taken.groups) == [3]
    assert taken.num_discarded == 3  # two that waited, and this step's surplus
    assert queue.account.is_closed


def test_discarded_groups_use_up_no_draws_of_their_batch():
    """Of 3 waiting groups 2 are too old for a smaller bound: 3 more are found in 4 draws."""
    sizes = dict(train=4, gen=4, max_gen=1)
    before = make_queue(**sizes, max_staleness=3)
    before.begin(1, weight_version=0)
    draws = draw_all(before, 0, 3, version=0)
    for draw, version in zip(draws, (0, 0, 2), strict=True):
        before.add_finished(replace(make_group(draw, MIXED, version), version=version))
    before.decide()
    queue = make_queue(**sizes, max_staleness=1)
    queue.load_state_dict(from_bytes(to_bytes(before.state_dict())))
    queue.begin(4, weight_version=3)
    assert queue.num_ready == 1 and queue.account.num_discarded == 2
    run_gen_batch(queue, 3, [MIXED] * 3, version=3)
    assert queue.is_ready() and indices(queue.take().groups) == [2, 3, 4, 5]
    assert queue.account.is_closed


def lower_to_zero(ahead, **sizes):
    """The queue of a run that goes on with max_staleness 0."""
    queue = make_queue(**sizes)
    queue.load_state_dict(from_bytes(to_bytes(ahead.state_dict())))
    queue.begin(1, weight_version=0)
    assert queue.account.is_closed
    return queue


def test_of_the_draws_of_a_run_that_was_further_ahead_a_wave_is_sampled():
    sizes = dict(train=2, gen=6, max_gen=1)
    ahead = make_queue(**sizes, max_staleness=4)
    ahead.begin(1, weight_version=0)
    draw_all(ahead, 0, 9, version=0)
    ahead.add_finished(make_group(ahead.open_groups[8], MIXED, version=0))
    queue = lower_to_zero(ahead, **sizes)
    assert indices(unfinished(queue)) == list(range(6)) and queue.account.num_discarded == 3
    for draw in unfinished(queue):
        queue.add_finished(make_group(draw, MIXED, version=0))
    queue.decide()
    assert queue.is_ready() and indices(queue.take().groups) == [0, 1]


def test_a_step_that_is_ready_waits_for_no_draws_of_a_run_that_was_further_ahead():
    """They would exhaust the batch after it, which no step asks for."""
    sizes = dict(train=2, gen=2, max_gen=1)
    ahead = make_queue(**sizes, max_staleness=4)
    ahead.begin(1, weight_version=0)
    run_gen_batch(ahead, 0, [MIXED, MIXED, WRONG], version=0)
    draw_all(ahead, 3, 2, version=0)
    queue = lower_to_zero(ahead, **sizes)
    assert queue.is_ready() and not queue.open_groups
    taken = queue.take()
    assert indices(taken.groups) == [0, 1] and taken.num_discarded == 2 and queue.account.is_closed


def test_a_step_holds_no_group_that_was_dropped():
    """A gen batch of long responses is gigabytes."""
    queue = make_queue(train=3, gen=4)
    queue.begin(1, weight_version=1)
    dropped = weakref.WeakSet()
    for first in (0, 4):
        groups = run_gen_batch(queue, first, [RIGHT, WRONG, MIXED, WRONG])
        dropped.update(sample for group in groups for sample in group.samples if group.prompt.index % 4 != 2)
        del groups
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
            draw_all(queue, first, 4)
            for draw, outcome in zip(unfinished(queue), of_batch, strict=True):
                if number == saved_after:
                    state = from_bytes(to_bytes(queue.state_dict()))
                    queue = make_queue(train=2, gen=4)
                    queue.load_state_dict(state)
                    queue.begin(3, weight_version=1)
                queue.add_finished(make_group(draw, outcome))
                number += 1
            queue.decide()
        assert queue.is_ready()
        return step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)

    assert result(num_finished) == result(None)


def test_a_run_that_ended_at_the_limit_has_as_many_gen_batches_again():
    queue = make_queue(train=2, gen=2, max_gen=1)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, MIXED])
    with pytest.raises(UserError):
        queue.is_ready()
    other = make_queue(train=2, gen=2, max_gen=1)
    other.load_state_dict(queue.state_dict())
    other.begin(1, weight_version=1)
    assert not other.is_ready()
    run_gen_batch(other, 2, [MIXED, WRONG])
    assert indices(other.take().groups) == [1, 2]


def test_a_ready_step_without_counts_reports_no_means_of_nothing():
    """Counts belong to the number of a step; this one is asked for under another."""
    ahead = make_queue(train=1, gen=3, max_staleness=2)
    ahead.begin(1, weight_version=0)
    run_gen_batch(ahead, 0, [MIXED, MIXED, MIXED], version=0)
    ahead.take()
    ahead.begin(3, weight_version=1)
    assert ahead.is_ready()
    metrics = step_metrics(ahead.take(), weight_version=1, num_retries=0, seconds=0.1)
    assert metrics["dapo/num_gen_batches"] == 0
    assert metrics["train/reward_mean"] == 0.5
    assert "reward/mean" not in metrics and "dapo/filter_ratio" not in metrics


def test_the_order_of_groups_is_the_order_of_prompts_whoever_answers_first():
    queue = make_queue(train=4, gen=4)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [MIXED] * 4, backwards=True)
    assert indices(queue.take().groups) == [0, 1, 2, 3]


def test_a_state_without_samples_has_every_group_in_its_place_again():
    """As the trainer keeps it after each step, for a controller that dies."""
    queue = make_queue(train=2, gen=4, max_staleness=1)
    queue.begin(1, weight_version=0)
    run_gen_batch(queue, 0, [MIXED, WRONG, MIXED, MIXED, RIGHT, MIXED], version=0)
    taken = queue.take()
    last = draw_all(queue, 6, 2, version=0)[1]
    queue.add_finished(make_group(last, MIXED, version=0))
    state = queue.state_dict(with_samples=False)
    assert "response_tokens" not in json.dumps(state)
    other = make_queue(train=2, gen=4, max_staleness=1)
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.account.is_closed and other.account.num_filtered == 2 and other.account.num_handed == 2
    other.begin(2, weight_version=1)
    assert indices(taken.groups) == [0, 2] and indices(unfinished(other)) == [3, 5, 6, 7]
    for draw in unfinished(other):
        other.add_finished(make_group(draw, MIXED, version=1))
    other.decide()
    step = other.take()
    assert indices(step.groups) == [3, 5]
    # the group dropped ahead is counted in the step that it was dropped for
    assert (taken.num_gen_batches, step.num_gen_batches) == (3 / 4, 3 / 4)
    assert step.filtered == {"all_correct": 1} and step.num_filtered_samples == 2


def test_a_state_without_samples_has_masked_groups_in_their_places_again():
    keys = dict(train=2, gen=4, max_staleness=1, masks=True)
    queue = make_queue(**keys)
    queue.begin(1, weight_version=0)
    run_gen_batch(queue, 0, [MIXED, WRONG, RIGHT], version=0)
    queue.take()
    other = make_queue(**keys)
    other.load_state_dict(json.loads(json.dumps(queue.state_dict(with_samples=False))))
    other.begin(2, weight_version=1)
    assert indices(unfinished(other)) == [2]
    for draw in (*unfinished(other), *draw_all(other, 3, 1, version=1)):
        other.add_finished(make_group(draw, RIGHT, version=1))
    other.decide()
    step = other.take()
    assert (step.num_gen_batches, step.filtered, step.num_filtered_samples) == (2 / 4, {"all_correct": 2}, 4)


def test_a_wave_is_not_decided_on_before_its_last_group():
    queue = make_queue(train=1, gen=2)
    queue.begin(1, weight_version=1)
    first, second = draw_all(queue, 0, 2)
    queue.add_finished(make_group(first, MIXED))
    assert queue.decide() == [] and not queue.is_ready() and queue.num_open == 2
    queue.add_finished(make_group(second, MIXED))
    assert indices(queue.decide()) == [0, 1] and queue.is_ready()


def test_with_asynchronous_rollouts_it_is_decided_on_the_finished_head_of_the_draws():
    queue = make_queue(train=2, gen=4, max_staleness=1)
    queue.begin(1, weight_version=0)
    drawn = draw_all(queue, 0, 4, version=0)
    for number in (2, 1):
        queue.add_finished(make_group(drawn[number], MIXED, version=0))
        assert queue.decide() == []
    queue.add_finished(make_group(drawn[0], WRONG, version=0))
    assert indices(queue.decide()) == [0, 1, 2]
    assert queue.is_ready() and queue.num_open == 1
    assert indices(queue.take().groups) == [1, 2]


def test_the_filter_looks_at_correctness_not_at_shaped_rewards():
    queue = make_queue(train=1, gen=1, max_gen=1)
    queue.begin(1, weight_version=1)
    draw_all(queue, 0, 1)
    (draw,) = unfinished(queue)
    group = make_group(draw, WRONG)
    shaped = tuple(Sample(**{**vars(sample), "reward": -0.1 * i}) for i, sample in enumerate(group.samples))
    queue.add_finished(Group(group.uid, group.prompt, shaped))
    queue.decide()
    with pytest.raises(UserError, match="all_incorrect 1"):
        queue.is_ready()


def test_uniform_data_ends_with_the_reason_counts():
    queue = make_queue(train=2, gen=4, max_gen=2)
    queue.begin(7, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, WRONG, RIGHT, MIXED])
    assert not queue.is_ready()
    run_gen_batch(queue, 4, [WRONG, WRONG, RIGHT, WRONG])
    with pytest.raises(UserError) as error:
        queue.is_ready()
    for part in ("max_num_gen_batches = 2", "1 of the 2 groups", "step 7", "all_correct 2", "all_incorrect 5"):
        assert part in str(error.value)


def test_train_partial_hands_over_what_there_is_but_never_nothing():
    queue = make_queue(train=2, gen=2, max_gen=1, on_exhausted="train_partial")
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, MIXED])
    assert queue.is_ready()
    assert indices(queue.take().groups) == [1]
    queue.begin(2, weight_version=1)
    run_gen_batch(queue, 2, [WRONG, RIGHT])
    with pytest.raises(UserError, match="0 of the 2 groups"):
        queue.is_ready()


def test_going_on_with_an_open_step_keeps_finished_groups_and_counts():
    queue = make_queue(train=2, gen=3)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [WRONG, WRONG, MIXED])
    draw_all(queue, 3, 3)
    queue.add_finished(make_group(unfinished(queue)[1], MIXED))
    queue.begin(1, weight_version=1)
    assert [draw.prompt.index for draw in unfinished(queue)] == [3, 5]
    for draw in unfinished(queue):
        queue.add_finished(make_group(draw, RIGHT))
    queue.decide()
    result = queue.take()
    assert indices(result.groups) == [2, 4]
    assert result.num_gen_batches == 2
    assert dict(result.filtered) == {"all_incorrect": 2, "all_correct": 2}


def test_truncation_counts_and_penalties():
    queue = make_queue(train=3, gen=3, mode="none")
    queue.begin(1, weight_version=1)
    draw_all(queue, 0, 3)
    how = [
        dict(finish_reason="length", is_truncated=True, is_terminated=False, reward=-0.5),
        dict(finish_reason="stop", is_truncated=True, is_terminated=False, reward=-0.25),
        dict(reward=-0.125),  # of the soft interval: not truncated
    ]
    for draw, overrides in zip(unfinished(queue), how, strict=True):
        queue.add_finished(make_group(draw, (False,), **overrides))
    queue.decide()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=4, seconds=1.0)
    assert metrics["dapo/num_truncated_samples"] == 2
    assert metrics["dapo/num_truncated_by_length"] == 1
    assert metrics["dapo/num_truncated_by_termination"] == 1
    assert metrics["dapo/truncation_ratio"] == pytest.approx(2 / 3)
    assert metrics["dapo/avg_truncation_penalty_applied"] == pytest.approx(0.375)
    assert metrics["reward/truncated_correct"] == 0.0
    assert metrics["rollout/num_retries"] == 4


def test_the_share_of_right_truncated_responses_counts_no_others():
    queue = make_queue(train=3, gen=3, mode="none")
    queue.begin(1, weight_version=1)
    draw_all(queue, 0, 3)
    cut = dict(finish_reason="length", is_truncated=True, is_terminated=False)
    for draw, (correct, how) in zip(unfinished(queue), [(True, cut), (False, cut), (True, {})], strict=True):
        queue.add_finished(make_group(draw, (correct,), **how))
    queue.decide()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)
    assert (metrics["reward/truncated_correct"], metrics["reward/accuracy"]) == (0.5, pytest.approx(2 / 3))


def test_a_step_without_truncated_responses_has_no_mean_penalty():
    queue = make_queue(train=1, gen=1, mode="none")
    queue.begin(1, weight_version=1)
    draw_all(queue, 0, 1)
    queue.add_finished(make_group(unfinished(queue)[0], (False,), reward=-0.125))
    queue.decide()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)
    assert metrics["dapo/num_truncated_samples"] == 0 and "dapo/avg_truncation_penalty_applied" not in metrics


def test_reward_errors_are_counted_by_kind():
    queue = make_queue(train=4, gen=4, mode="none")
    queue.begin(1, weight_version=1)
    draw_all(queue, 0, 4)
    for draw, error in zip(unfinished(queue), ["timeout", "crash", "exception: ValueError", None], strict=True):
        queue.add_finished(make_group(draw, (False,), reward_error=error))
    queue.decide()
    metrics = step_metrics(queue.take(), weight_version=1, num_retries=0, seconds=1.0)
    assert [metrics[f"reward/num_{kind}"] for kind in ("timeouts", "crashes", "exceptions")] == [1, 1, 1]


@given(st.integers(0, 3))
@settings(deadline=None, max_examples=4)
def test_state_saved_in_the_middle_of_a_gen_batch_goes_on_where_it_was(num_finished):
    queue = make_queue(train=3, gen=3)
    queue.begin(1, weight_version=1)
    draw_all(queue, 0, 3)
    for draw in unfinished(queue)[:num_finished]:
        queue.add_finished(make_group(draw, MIXED))
    other = make_queue(train=3, gen=3)
    other.load_state_dict(queue.state_dict())
    other.begin(1, weight_version=1)
    assert [draw.prompt.index for draw in unfinished(other)] == list(range(num_finished, 3))
    for draw in unfinished(other):
        other.add_finished(make_group(draw, MIXED))
    other.decide()
    assert indices(other.take().groups) == [0, 1, 2]

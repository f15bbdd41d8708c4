"""Groups held by a run that samples ahead of its trainer,
and its way back from missing verdicts."""

import gc
import weakref
from dataclasses import replace

import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.rollout.drawing import Drawing
from megatron_dapo.rollout.step_metrics import step_metrics
from megatron_dapo.rollout.verdicts import TooFewVerdicts
from tests.unit.test_dynamic_sampling import RIGHT, make_queue, run_gen_batch

pytestmark = pytest.mark.unit

MIXED, WRONG = (True, False), (False, False)
PROMPTS = [Prompt(index, f"key{index}", (1, 2), f"p{index}", "test", "0") for index in range(40)]


def make_drawing() -> Drawing:
    """Steps of 4 groups of 2 samples, of which those with signal may wait for one version."""
    config = load_config(
        None,
        [
            "actor_rollout_ref.model.path=unused",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.max_staleness=1",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.dynamic_sampling.enable=true",
            "data.train_files=[unused.jsonl]",
            "data.train_batch_size=4",
            "data.shuffle=false",
            "reward.function=math_dapo",
        ],
    )
    return Drawing(config, PromptDataset(PROMPTS, []), lambda: "")


def draw(drawing: Drawing) -> Group:
    prompt, replayed = drawing.next_prompt()
    return drawing.queue.draw(prompt, weight_version=1, replayed=replayed)


def finish(drawing: Drawing, group: Group, outcome: tuple[bool, bool], error: str | None = None) -> list[Sample]:
    sample = dict(
        uid=group.uid, prompt_tokens=(1, 2), response_tokens=(3, 4, 5), rollout_log_probs=(0.0,) * 3,
        loss_mask=(1,) * 3, weight_versions=(1,) * 3, finish_reason="stop", is_truncated=False, reward_error=error,
    )  # fmt: skip
    samples = [Sample(**sample, raw_reward=float(right), reward=float(right), correct=right) for right in outcome]
    drawing.queue.add_finished(replace(group, samples=tuple(samples)))
    return samples


def test_a_group_that_was_finished_before_its_step_began_is_gone_when_it_is_dropped():
    """It waited for the group before it. The run's fallback must not keep its tokens
    until the step's end."""
    drawing = make_drawing()
    drawing.begin(1, weight_version=1)
    groups = [draw(drawing) for _ in range(10)]
    for group in groups[:8]:
        finish(drawing, group, MIXED)
    dropped = [weakref.ref(sample.response_tokens) for sample in finish(drawing, groups[9], WRONG)]
    drawing.decide(is_waited_for=True)
    drawing.take()
    drawing.begin(2, weight_version=2)
    assert len(dropped) == 2 and all(tokens() is not None for tokens in dropped)
    finish(drawing, groups[8], WRONG)
    drawing.decide(is_waited_for=False)
    gc.collect()
    assert not any(tokens() is not None for tokens in dropped) and drawing.queue.account.num_filtered == 2
    assert not drawing.take().filtered  # they count for the batch being filled, step 3's


def test_a_run_without_verdicts_goes_back_to_the_groups_that_wait_and_samples_the_open_ones_again():
    drawing = make_drawing()
    drawing.begin(1, weight_version=1)
    groups = [draw(drawing) for _ in range(10)]
    for group in groups[:8]:
        finish(drawing, group, MIXED)
    finish(drawing, groups[9], MIXED)
    drawing.decide(is_waited_for=True)
    drawing.take()
    drawing.begin(2, weight_version=2)
    ready = [draw(drawing) for _ in range(4)]
    finish(drawing, groups[8], MIXED, error="exception: ValueError")
    for group in ready:
        finish(drawing, group, MIXED, error="exception: ValueError")
    with pytest.raises(TooFewVerdicts, match="rollout step 2: 10 of 12 responses got no verdict"):
        drawing.decide(is_waited_for=True)
    drawing.begin(2, weight_version=2)
    queue = drawing.queue
    assert [group.uid for group in queue.open_groups] == [group.uid for group in groups[8:]]
    assert queue.num_unfinished == 2 and not any(group.samples for group in queue.open_groups)
    assert drawing.next_prompt()[0].index == 10
    assert [group.uid for group in drawing.take().groups] == [group.uid for group in groups[4:8]]
    assert queue.account.is_closed


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_step_that_was_decided_on_ahead_reports_the_groups_of_its_batch(is_resumed):
    queue = make_queue(train=2, gen=2, max_gen=3, max_staleness=2)
    queue.begin(1, weight_version=0)
    run_gen_batch(queue, 0, [MIXED, MIXED, RIGHT, MIXED, WRONG, MIXED, WRONG], version=0)
    metrics = []
    for step in (1, 2, 3):
        if is_resumed:
            state = from_bytes(to_bytes(queue.state_dict()))
            queue = make_queue(train=2, gen=2, max_gen=3, max_staleness=2)
            queue.load_state_dict(state)
        queue.begin(step, weight_version=step - 1)
        if step == 3:
            run_gen_batch(queue, 7, [MIXED, MIXED], version=2)
        metrics.append(step_metrics(queue.take(), weight_version=step - 1, num_retries=0, seconds=1.0))
    names = ("dapo/num_kept_groups", "dapo/num_filtered_groups", "dapo/num_gen_batches")
    assert [tuple(each[name] for name in names) for each in metrics] == [(2, 0, 1.0), (2, 2, 2.0), (2, 1, 1.5)]
    assert [each["reward/mean"] for each in metrics] == [0.5, 0.5, pytest.approx(1 / 3)]
    assert [each["rollout/num_tokens"] for each in metrics] == [12, 24, 18]
    assert queue.account.is_closed

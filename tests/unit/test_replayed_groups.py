"""Groups with a replayed sample: controller, dynamic sampling, metrics, state, dumps,
training batches."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.data.samples import Prompt, RolloutBatch
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits
from megatron_dapo.rollout.batch_files import read_batch, write_batch
from megatron_dapo.rollout.batch_replay import BatchReplay
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.step_metrics import step_metrics
from tests.fake_rollout import FakeServer, Script, make_config, needs_sync
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

REPLAY = "exp_manager.experience_replay"
ON = [f"{REPLAY}.enable=true", f"{REPLAY}.replay_start_ratio=0.0", f"{REPLAY}.exp_ratio=0.5"]


def run(folder, scenario, script, *overrides):
    """Awaits `scenario(controller, server)` with replay on and groups of 4."""

    async def main():
        server = await FakeServer(script).start()
        config = make_config(folder, [server], *ON, "actor_rollout_ref.rollout.n=4", *overrides)
        controller = Controller(config)
        try:
            await controller.start()
            return await asyncio.wait_for(scenario(controller, server), 120)
        finally:
            await controller.close()
            await server.stop()

    return asyncio.run(main())


def replayed(group):
    return [sample for sample in group.samples if sample.exp_mask]


def test_a_replayed_group_has_one_trajectory_of_an_earlier_step_and_n_minus_1_new_ones(folder):
    async def scenario(controller, server):
        first = await controller.next_batch(1, 1)
        assert not any(replayed(group) for group in first.groups) and len(server.requests) == 16
        assert first.metrics["replay/num_prompts"] == 4 and first.metrics["replay/num_trajectories"] == 8

        server.version = 2
        second = await controller.next_batch(2, 2)
        assert len(server.requests) == 16 + 2 * 4 + 2 * 3
        assert [len(replayed(group)) for group in second.groups] == [0, 1, 0, 1]
        for group in second.groups:
            assert {sample.uid for sample in group.samples} == {group.uid} and len(group.samples) == 4
        for group in filter(replayed, second.groups):
            (old,) = replayed(group)
            (origin,) = [each for each in first.groups if each.prompt == group.prompt]
            assert replace(old, uid=origin.uid, exp_mask=False) in origin.samples
            assert old.correct and old.weight_versions.tolist() == [1, 1]
            assert old.rollout_log_probs.tolist() == [-0.5, -0.5]
        return second.metrics

    metrics = run(folder, scenario, Script())
    assert metrics["replay/num_replayed_groups"] == 2 and metrics["replay/age_mean"] == 1
    assert metrics["rollout/staleness_max"] == 0  # of the tokens written for the step
    assert metrics["rollout/num_tokens"] == 14 * 2


def test_an_open_gen_batch_keeps_its_replayed_samples_through_a_sync(folder):
    async def scenario(controller, server):
        await controller.next_batch(1, 1)
        num_requests = len(server.requests)
        assert await needs_sync(controller.next_batch(2, 2))  # the server still has version 1
        server.version = 2
        batch = await controller.next_batch(2, 2)
        assert sum(len(replayed(group)) for group in batch.groups) == 2
        assert sum(1 not in sample.weight_versions for group in batch.groups for sample in group.samples) == 14
        return len(server.requests) - num_requests

    assert run(folder, scenario, Script()) >= 14


def test_a_restored_controller_draws_the_same_experiences(folder):
    """Saved between two steps, through JSON as a checkpoint is."""

    async def save(controller, server):
        await controller.next_batch(1, 1)
        state = from_bytes(to_bytes(controller.state_dict()))
        return state, await controller.next_batch(2, 1)

    state, expected = run(folder, save, Script())

    async def resume(controller, server):
        controller.load_state_dict(state)
        return await controller.next_batch(2, 1)

    resumed = run(folder, resume, Script())
    assert [replayed(group) for group in resumed.groups] == [replayed(group) for group in expected.groups]
    assert [group.prompt for group in resumed.groups] == [group.prompt for group in expected.groups]
    same = [name for name in expected.metrics if name.startswith("replay/")]
    assert len(same) == 6 and all(resumed.metrics[name] == expected.metrics[name] for name in same)


def test_a_controller_without_replay_goes_on_from_a_state_with_it_and_the_reverse(folder):
    async def state_of(controller, server):
        await controller.next_batch(1, 1)
        return controller.state_dict()

    with_pool, without = run(folder, state_of, Script()), run(folder, state_of, Script(), f"{REPLAY}.enable=false")

    async def resume(state):
        async def scenario(controller, server):
            controller.load_state_dict(state)
            return len((await controller.next_batch(2, 1)).groups)

        return scenario

    assert "experiences" in with_pool and "experiences" not in without
    assert run(folder, asyncio.run(resume(without)), Script()) == 4
    assert run(folder, asyncio.run(resume(with_pool)), Script(), f"{REPLAY}.enable=false") == 4


# --------------------------------------------------------------------------------- dynamic sampling


def filtered(num_right_of_7):
    """A gen batch of one prompt with 8 responses: a replayed right one, and 7 new ones,
    some of them right."""
    (group,) = synthetic_groups(64, num_groups=1, n=8)
    queue = GroupQueue(QueueLimits(1, 1), by_correctness("strict"))
    queue.begin(1, weight_version=1)
    old = replace(group.samples[0], correct=True, reward=1.0, weight_versions=(3,) * 99)
    draw = queue.draw(Prompt(0, "key", (1, 2), "p", "test", "0"), weight_version=5, replayed=old)
    of_weights = {"weight_versions": (5,) * 6, "loss_mask": (1,) * 6, "rollout_log_probs": (-0.5,) * 6}
    new = [
        replace(sample, uid=draw.uid, correct=i < num_right_of_7, response_tokens=(1,) * 6, **of_weights)
        for i, sample in enumerate(group.samples[1:])
    ]
    queue.add_finished(replace(group, uid=draw.uid, samples=(draw.samples[0], *new)))
    queue.decide()
    return queue, draw


def test_task_a_one_replayed_success_and_seven_failures_is_kept():
    queue, draw = filtered(0)
    result = queue.take()
    assert result.filtered.total() == 0 and len(result.groups) == 1
    assert draw.samples[0].exp_mask and draw.samples[0].uid == draw.uid
    metrics = step_metrics(result, weight_version=5, num_retries=0, seconds=1.0)
    assert metrics["reward/accuracy"] == 0.0 and metrics["train/accuracy"] == 1 / 8
    # the replayed one was not generated
    assert metrics["response_length/mean"] == metrics["response_length/max"] == 6
    assert metrics["rollout/staleness_max"] == 0


def test_task_b_one_replayed_success_and_seven_more_is_filtered():
    queue, _ = filtered(7)
    result = queue.take()
    assert dict(result.filtered) == {"all_correct": 1} and not result.groups
    metrics = step_metrics(result, weight_version=5, num_retries=0, seconds=1.0)
    assert metrics["dapo/num_filtered_samples"] == 8 and metrics["dapo/filter_ratio"] == 1.0


# --------------------------------------------------------------------------------- training batches


def with_one_replayed():
    groups = synthetic_groups(64, num_groups=2, n=3)
    first = groups[0].samples
    changed = (replace(first[0], exp_mask=True, is_terminated=False), *first[1:])
    return [replace(groups[0], samples=changed), groups[1]]


def test_dumped_batches_keep_which_samples_were_replayed(tmp_path):
    batch = RolloutBatch(tuple(with_one_replayed()), {})
    write_batch(tmp_path, 1, batch)
    assert read_batch(tmp_path, 1) == batch
    assert BatchReplay(tmp_path, 64, takes_experiences=True).next_batch(1, 0) == batch
    with pytest.raises(UserError, match=f"step_000001.json.gz has samples .* set {REPLAY}.enable to true"):
        BatchReplay(tmp_path, 64).next_batch(1, 0)


@pytest.mark.parametrize("packed", [True, False])
def test_old_log_probs_of_a_replayed_sample_are_the_recorded_ones(packed):
    samples = assemble(with_one_replayed())
    batch = collate(samples, pad_multiple=8, packed=packed)
    assert batch.with_recorded_log_probs() is batch  # nothing was asked yet
    scored = batch.with_log_probs(old=torch.full_like(batch.loss_mask, -9.0)).with_recorded_log_probs()
    marks, old = scored.by_sample(scored.exp_mask), scored.by_sample(scored.old_log_probs)
    for sample in samples:
        is_replayed = sample.sample_id == 0
        assert set(marks[sample.sample_id].tolist()) == {float(is_replayed)}
        expected = sample.rollout_log_probs if is_replayed else np.full(sample.length, -9.0)
        assert old[sample.sample_id].tolist() == expected.tolist()
    # padding behind it may be marked, it does not count
    assert float(scored.exp_mask.sum()) >= samples[0].length


def test_the_replayed_sample_belongs_to_its_groups_mean():
    """One success of 4, from replay: deviations of 1, 0, 0, 0 are sqrt(3/16 * 4/3) = 0.5."""
    (group,) = synthetic_groups(64, num_groups=1, n=4)
    samples = [replace(s, reward=float(i == 0), exp_mask=i == 0) for i, s in enumerate(group.samples)]
    advantages = [sample.advantage for sample in assemble([replace(group, samples=tuple(samples))])]
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)

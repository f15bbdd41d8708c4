"""Whether enough responses got a verdict, of a step that was stopped and goes on."""

import asyncio
import sys

import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.rollout_errors import Interrupted
from tests.fake_rollout import Script, make_config, run_with_controller, write_files

pytestmark = pytest.mark.unit

FAILS = "def score(data_source, response, ground_truth, extra_info):\n    raise LookupError('no such table')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("fake_rewards", None)


def run(folder, scenario, script=None):
    key = "actor_rollout_ref.rollout.max_concurrency=2"
    return run_with_controller(scenario, lambda servers: make_config(folder, servers, key), 1, script)


def stopped_while_sampling(folder) -> dict:
    """The state of a step of 4 groups, of which 2 are finished."""
    script = Script()
    script.delays = [600.0] * 4 + [0.0] * 4  # taken from the end

    async def scenario(controller, servers):
        step = asyncio.create_task(controller.next_batch(1, 1))
        while len(controller.state_dict()["queue"]["finished"]) < 2:
            await asyncio.sleep(0.01)
        controller.stop_asked.set()
        with pytest.raises(Interrupted):
            await step
        return from_bytes(to_bytes(controller.state_dict()))

    return run(folder, scenario, script)


def test_groups_that_a_broken_reward_left_without_a_verdict_are_sampled_again_once_it_is_corrected(folder):
    """Otherwise a run stopped because its reward fails trains on that failure when it goes on."""
    (folder / "fake_rewards.py").write_text(FAILS)
    state = stopped_while_sampling(folder)
    write_files(folder)
    sys.modules.pop("fake_rewards", None)

    async def scenario(controller, servers):
        controller.load_state_dict(state)
        batch = await controller.next_batch(1, 1)
        assert [int(group.prompt.text[1:]) for group in batch.groups] == [0, 1, 2, 3]
        assert batch.metrics["reward/num_exceptions"] == 0 and len(servers[0].requests) == 8

    run(folder, scenario)


def test_groups_with_a_few_failures_stay_as_they_are_and_count(folder):
    """The run that goes on is the run that was not stopped."""
    write_files(folder, extra_info={"crash": True})  # every second response
    state = stopped_while_sampling(folder)

    async def scenario(controller, servers):
        controller.load_state_dict(state)
        batch = await controller.next_batch(1, 1)
        assert batch.metrics["reward/num_exceptions"] == 4 and len(servers[0].requests) == 4

    run(folder, scenario)

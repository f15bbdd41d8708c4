"""Batches of synchronous runs, group by group, as the program without asynchronous rollouts made them.

The records (`synchronous_record.json`) were written by that program, of runs whose steps had no surplus groups.
"""

import json
import random
from pathlib import Path

import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.data.samples import Group
from tests.fake_rollout import MIXED, RIGHT, WRONG, Script, rollout_folder, run_in_folder

pytestmark = pytest.mark.unit

RECORD = Path(__file__).with_name("synchronous_record.json")
NUM_STEPS = 6
SAVED_AFTER = 3  # steps; then another controller goes on
REPLAY = "exp_manager.experience_replay"


def _gen_batches_that_fill_a_step() -> dict[int, tuple[str, str]]:
    """Of each 6 prompts 4 carry signal, at places that change."""
    chooser = random.Random(5)
    responses = {}
    for first in range(0, 6 * NUM_STEPS, 6):
        for number in chooser.sample(range(first, first + 6), 2):
            responses[number] = chooser.choice([RIGHT, WRONG])
    return responses


def _any_outcome() -> dict[int, tuple[str, str]]:
    chooser = random.Random(6)
    return {number: chooser.choice([RIGHT, WRONG, MIXED]) for number in range(100)}


CASES = {
    "resample": (["data.gen_batch_size=6"], _gen_batches_that_fill_a_step()),
    "mask": (["algorithm.dynamic_sampling.form=mask", "data.shuffle=true"], _any_outcome()),
    "unfiltered": (["algorithm.dynamic_sampling.enable=false", "data.shuffle=true"], _any_outcome()),
    "replay": (
        [
            "algorithm.dynamic_sampling.enable=false",
            f"{REPLAY}.enable=true",
            f"{REPLAY}.replay_start_ratio=0.0",
            f"{REPLAY}.exp_ratio=0.5",
        ],
        {},
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    yield from rollout_folder(tmp_path, monkeypatch)


def _line(group: Group) -> str:
    """uid, whether it is trained on, and of each response its text and the versions that wrote it."""
    responses = sorted(
        f"{sample.response_text}@{sorted(set(sample.weight_versions.tolist()))}" for sample in group.samples
    )
    return " ".join([group.uid, "kept" if group.keep else "masked", *responses])


def _batches(folder: Path, case: str) -> list[list[str]]:
    """The steps of a run by two servers that answer in any order, with a resume in the middle."""
    overrides, responses = CASES[case]
    chooser = random.Random(7)

    async def steps(controller, servers, numbers):
        batches = []
        for step in numbers:
            for server in servers:
                server.version = step - 1
            servers[0].script.delays = [chooser.random() * 0.02 for _ in range(12)]
            batch = await controller.next_batch(step, step - 1)
            assert not batch.needs_sync and batch.metrics["rollout/num_groups_discarded"] == 0
            batches.append([_line(group) for group in batch.groups])
        return batches

    async def first(controller, servers):
        batches = await steps(controller, servers, range(1, SAVED_AFTER + 1))
        return batches, from_bytes(to_bytes(controller.state_dict()))

    batches, state = run_in_folder(folder, first, Script(responses), num_servers=2, overrides=overrides)

    async def second(controller, servers):
        controller.load_state_dict(state)
        return await steps(controller, servers, range(SAVED_AFTER + 1, NUM_STEPS + 1))

    return batches + run_in_folder(folder, second, Script(responses), num_servers=2, overrides=overrides)


@pytest.mark.parametrize("case", CASES)
def test_a_synchronous_run_without_surplus_has_the_recorded_batches(folder, case):
    assert _batches(folder, case) == json.loads(RECORD.read_text())[case]

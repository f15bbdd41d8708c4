"""The demo with an agent of OpenAI's Agents SDK, in a short form; as a proof it learns."""

import json

import pytest

from examples.agents.demo import DEMO
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.proofs import amount, proof

pytestmark = pytest.mark.e2e

NUM_STEPS = amount(2, 12)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("demo") / "run"
    steps = f"trainer.total_training_steps={NUM_STEPS}"
    run_here(DEMO.run, steps, "trainer.dump_batches=true", f"trainer.run_dir={folder}")
    return RunFolder(folder)


@pytest.fixture(scope="module")
def metrics(run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@proof
def test_the_model_learns_to_call_the_tool_of_the_agent(metrics):
    before, *_, after = [line["val/accuracy"] for line in metrics if "val/accuracy" in line]
    assert after >= max(0.8, before + 0.3)


def test_the_server_saw_exactly_the_tokens_that_are_trained_on(metrics):
    """Bounds as in tests/e2e/test_multi_turn.py."""
    steps = [line for line in metrics if "actor/rollout_abs_diff_max" in line]
    assert len(steps) == NUM_STEPS
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 for line in steps)


def test_a_trajectory_with_a_call_is_one_row_of_two_turns(run):
    samples = [sample for group in read_batch(run.batches, 1).groups for sample in group.samples]
    assert all(len(sample.branches) == 1 and sample.reward_error is None for sample in samples)
    assert {sample.num_turns for sample in samples} >= {1, 2}

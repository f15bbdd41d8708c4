"""A mixture of experts learns the demo's task with replayed routing: the example with fewer of its
steps. A proof: other tests have dense demos, and mixtures with replayed experts."""

import json
from statistics import fmean

import pytest

from examples.arithmetic.mixture import DEMO, OVERRIDES
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.proofs import proof

pytestmark = [pytest.mark.e2e, proof]

NUM_STEPS = 12


@pytest.fixture(scope="module")
def metrics(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("mixture") / "run"
    run_here(DEMO.run, *OVERRIDES, f"trainer.total_training_steps={NUM_STEPS}", f"trainer.run_dir={folder}")
    return [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]


def steps(metrics: list[dict]) -> list[dict]:
    return [line for line in metrics if "actor/loss" in line]


def test_the_reward_climbs_and_so_does_the_held_out_accuracy(metrics):
    rewards = [line["reward/mean"] for line in steps(metrics)]
    assert len(rewards) == NUM_STEPS and fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.15
    before, *_, after = [line["val/accuracy"] for line in metrics if "val/accuracy" in line]
    assert after >= 1.5 * before


def test_the_trainer_takes_the_servers_experts_and_so_computes_its_log_probs(metrics):
    """In float32 both choose alike, but near ties. The bounds are those
    of the dense demo (test_program.py)."""
    for line in steps(metrics):
        # the second optimizer step meets moved weights
        assert 0.0 <= line["actor/router_mismatch"] < 0.1
        assert line["actor/expert_dropped"] == 0.0 and line["actor/expert_load_max"] > 1.0
    compared = [line for line in steps(metrics) if "actor/rollout_kl" in line]
    assert len(compared) >= NUM_STEPS / 2
    assert all(line["actor/rollout_abs_diff"] < 1e-6 for line in compared)
    assert max(line["actor/rollout_abs_diff_max"] for line in compared) < 5e-4

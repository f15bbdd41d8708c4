"""A batch from another model is not trained on: the run names the server, saves and stops."""

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from launch.local import main
from megatron_dapo.common.exit_codes import MISMATCH_EXIT_CODE
from megatron_dapo.data.samples import Group, RolloutBatch
from megatron_dapo.rollout.batch_files import write_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests import mpi_replay
from tests.forked_local import forks
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.distributed

OWN, FOREIGN = "http://own:1", "http://foreign:2"
MAX_MISMATCH = "algorithm.rollout_correction.max_mismatch"


def written_by(server: str, log_prob: float, group: Group, weight_version: int) -> Group:
    """Tokens that weights of this version are said to have written, with such log-probs."""
    samples = [
        replace(
            sample,
            servers=(server,),
            rollout_log_probs=(log_prob,) * sample.num_response_tokens,
            weight_versions=(weight_version,) * sample.num_response_tokens,
        )
        for sample in group.samples
    ]
    return replace(group, samples=tuple(samples))


def batches(folder: Path, second_version: int) -> Path:
    """Two steps. The first has no token of the step's own weights or older ones, and cannot be
    checked. A quarter of the second comes from a server with the log-probs of no model of this
    size."""
    for step, version in ((1, 7), (2, second_version)):
        groups = synthetic_groups(64, num_groups=16, n=8, max_prompt=8, max_response=40, seed=step)
        groups = [
            written_by(*((FOREIGN, -60.0) if number % 4 == 0 else (OWN, -4.0)), group, version)
            for number, group in enumerate(groups)
        ]
        write_batch(folder, step, RolloutBatch(tuple(groups), {}))
    return folder


@pytest.mark.parametrize("num_optimizer_steps, max_staleness", [(1, 0), (2, 0), (1, 1)])
def test_a_batch_of_another_model_ends_the_run_on_all_ranks_with_the_step_before_saved(
    tmp_path, num_optimizer_steps, max_staleness
):
    """With one optimizer step per rollout step no log-probs are computed before the update: its own
    forward pass tells, before the step is taken. If rollouts may run ahead, weights of one version
    before wrote all of it."""
    keys = [
        f"{MAX_MISMATCH}=8.0",  # the base model on random tokens is some nats off, at any log-prob
        f"actor_rollout_ref.actor.ppo_mini_batch_size={16 // num_optimizer_steps}",
        "trainer.n_procs_per_node=2",
        "trainer.save_interval=-1",
    ]
    if max_staleness:
        keys += [f"actor_rollout_ref.rollout.max_staleness={max_staleness}"]
        keys += ["algorithm.rollout_correction.rollout_is=token"]
    run = RunFolder(tmp_path / "run")
    with forks(), mock.patch.dict(os.environ):
        code = main(mpi_replay.arguments(batches(tmp_path / "batches", 1 - max_staleness), run.path, *keys))
    error = run.log("trainer-rank-0").read_text()
    assert code == MISMATCH_EXIT_CODE, error[-3000:]
    [sentence] = [line for line in error.splitlines() if "is not trained on" in line]
    assert "the batch of step 2 " in sentence and f"{MAX_MISMATCH} 8" in sentence
    by = {server: float(amount) for server, amount in re.findall(r"(http://\w+:\d) by ([\d.]+)", sentence)}
    assert list(by) == [FOREIGN, OWN] and by[FOREIGN] > 30 and by[OWN] < 12
    assert [line["step"] for line in mpi_replay.metrics_of(run.path)] == [1]
    assert run.checkpoint(1).is_dir() and not run.model.exists()
    assert not [log for log in run.logs.glob("trainer-rank-*.log") if "Traceback" in log.read_text()]

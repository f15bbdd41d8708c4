"""The trainer started by `srun --mpi=pmix`, over two nodes: the run that torchrun makes on one machine."""

import sys

import pytest

from tests import mpi_replay

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")


@pytest.fixture
def srun(cluster):
    """Runs a command as an MPI job."""

    def run(*command: str, mpi: str = "pmix") -> str:
        return cluster.run("srun", f"--mpi={mpi}", *TWO_NODES, *command, OMP_NUM_THREADS="1")

    try:
        run("true")
    except AssertionError as error:
        if "PMIx" in str(error):
            pytest.skip("Slurm finds no libpmix here: `make setup-slurm` installs it on Debian and Ubuntu")
        raise
    return run


def test_the_demo_trains_under_srun_with_pmix_as_under_torchrun_bit_for_bit(cluster, srun):
    folder = cluster.folder / "mpi"
    batches, runs = mpi_replay.write_batches(folder / "batches"), (folder / "torchrun", folder / "srun")
    expected, given = (mpi_replay.arguments(batches, run) for run in runs)
    over_nodes = ("trainer.nnodes=2", "trainer.n_procs_per_node=1")
    srun(sys.executable, "-m", "launch.mpi", *given, *over_nodes)
    done = mpi_replay.torchrun(2, *expected)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [mpi_replay.metrics_of(run) for run in runs]
    assert metrics[1] == metrics[0] and [line["step"] for line in metrics[0]] == [1, 2]
    assert mpi_replay.model_of(runs[1]) == mpi_replay.model_of(runs[0])


def test_tasks_that_srun_starts_without_mpi_are_refused_before_each_trains_alone(srun):
    with pytest.raises(AssertionError) as failure:
        srun(sys.executable, "-m", "launch.mpi", "--config", "configs/demo.yaml", mpi="none")
    told = str(failure.value)
    assert told.count("The launcher started 2 processes (SLURM_STEP_NUM_TASKS), but Open MPI") == 1
    assert "use srun --mpi=pmix" in told and "exit code 2" in told

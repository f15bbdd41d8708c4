"""The trainer started by `srun --mpi=pmix`, over two nodes: torchrun's run on one machine."""

import sys

import pytest

from tests import mpi_replay
from tests.proofs import proof

pytestmark = pytest.mark.slurm

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


@proof
def test_the_demo_trains_under_srun_with_pmix_as_under_torchrun_bit_for_bit(cluster, srun):
    folder = cluster.folder / "mpi"
    batches, runs = mpi_replay.write_batches(folder / "batches"), (folder / "torchrun", folder / "srun")
    under_torchrun, under_srun = (mpi_replay.arguments(batches, run) for run in runs)
    over_nodes = ("trainer.nnodes=2", "trainer.n_procs_per_node=1")
    srun(sys.executable, "-m", "launch.mpi", *under_srun, *over_nodes)
    done = mpi_replay.torchrun(2, *under_torchrun)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [mpi_replay.metrics_of(run) for run in runs]
    assert metrics[1] == metrics[0] and [line["step"] for line in metrics[0]] == [1, 2]
    assert mpi_replay.model_of(runs[1]) == mpi_replay.model_of(runs[0])


@pytest.mark.parametrize(("mpi", "variable"), [("none", "SLURM_STEP_NUM_TASKS"), ("pmi2", "PMI_SIZE")])
def test_tasks_that_open_mpi_cannot_join_are_refused_before_each_trains_by_itself(srun, mpi, variable):
    with pytest.raises(AssertionError) as failure:
        srun(sys.executable, "-m", "launch.mpi", "--config", "configs/demo.yaml", mpi=mpi)
    message = str(failure.value)
    assert message.count(f"The launcher started 2 processes ({variable}), but Open MPI") == 1
    assert "srun --mpi=pmix" in message and "exit code 2" in message

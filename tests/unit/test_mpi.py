"""launch.mpi's decisions: whether the processes are one job, and on which network they meet."""

import pytest

from launch.mpi import Interface, RankVariables, check_world, shared_interfaces
from megatron_dapo.__main__ import main
from megatron_dapo.common.ends import FOLDER_VARIABLE
from megatron_dapo.common.errors import UserError
from tests.unit.test_cli import sound_config

pytestmark = pytest.mark.unit

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
# mpirun in a job of Slurm starts its own daemons with srun, one per node
MPIRUN_IN_SLURM = {**OPEN_MPI, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
PMI2 = {**SRUN, "PMI_SIZE": "4", "PMI_RANK": "1"}


@pytest.mark.parametrize("environment", [OPEN_MPI, SRUN, MPIRUN_IN_SLURM, PMI2])
def test_processes_that_mpi_sees_all_of_are_one_job(environment):
    check_world(environment, 4)


def test_a_process_that_no_launcher_started_is_a_job_of_one():
    check_world({"HOME": "/root"}, 1)


@pytest.mark.parametrize(
    ("environment", "variable", "cure"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "the mpirun of the MPI library that mpi4py loads"),
        (SRUN, "SLURM_STEP_NUM_TASKS", "srun --mpi=pmix for Open MPI or --mpi=pmi2 for MPICH"),
        (MPIRUN_IN_SLURM, "OMPI_COMM_WORLD_SIZE", "the mpirun of the MPI library"),
        (PMI2, "PMI_SIZE", "srun --mpi=pmix"),  # Open MPI under --mpi=pmi2
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS", "start it with srun --mpi=pmix, or with mpirun"),  # in a batch script
    ],
)
def test_a_launch_that_fell_apart_is_refused_with_the_cure(environment, variable, cure):
    with pytest.raises(UserError) as refusal:
        check_world(environment, 1, "Open MPI v5.0.11")
    (sentence,) = refusal.value.sentences
    assert (
        f"The launcher started 4 processes ({variable}), but Open MPI v5.0.11 sees 1" in sentence and cure in sentence
    )


def test_the_variables_are_torchruns():
    assert RankVariables(5, 8, 1, 4, "10.0.0.1", 20000).variables() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20000",
    }


def test_servers_started_apart_from_the_trainer_cannot_share_its_gpus(tmp_path, monkeypatch, capsys):
    """They would meet the lease of an earlier start, or a second trainer servers asleep already."""
    config = sound_config(tmp_path)
    servers = ["actor_rollout_ref.rollout.server_urls=[http://n1:1]", "actor_rollout_ref.hybrid_engine=true"]
    for name in ("RANK", "WORLD_SIZE", FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--config", str(config), *servers]) == 2, "the program of launch.mpi and of torchrun"
    shown = capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert "actor_rollout_ref.hybrid_engine is true, but torchrun, mpirun" in shown and "launch.local" in shown


def bridge() -> Interface:
    """Of containers: the same address on every machine."""
    return Interface("docker0", "172.17.0.1", "172.17.0.0/16")


def test_nodes_meet_on_a_network_with_separate_addresses():
    def node(number: int) -> list[Interface]:
        return [
            bridge(),
            Interface("eno1", f"192.168.{number}.7", f"192.168.{number}.0/24"),  # everyone's own
            Interface("ib0", f"10.1.0.{number}", "10.1.0.0/16"),
        ]

    assert [interface.name for interface in shared_interfaces([node(1), node(2), node(3)])] == ["ib0"]
    assert shared_interfaces([node(1)[:2], node(2)]) == [], "rank 0's node is not on it"
    assert shared_interfaces([node(1), node(2), node(3)[:2]]) == [], "the third is not on it"

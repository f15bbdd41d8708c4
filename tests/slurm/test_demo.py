"""`sbatch slurm/demo.sh`: the demo's training over nodes, each with a network of its own, to its end."""

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_it_trains_on_two_nodes(preempted):
    """Requeued on the way, as the next one: test_matrix.py looks at that."""
    assert preempted.exit_code() == 0, preempted.report()
    assert preempted.last_line() == f"DONE: step 5 of 5 in {preempted.run_folder.path}"
    assert_it_trained(preempted, server_node="node2")


def test_all_that_runs_python_runs_in_the_container(preempted, cluster):
    assert preempted.exit_code() == 0, preempted.report()
    commands = (cluster.folder / "programs" / "contained").read_text()
    for asked in ("plan --config", "node preflight", "node servers", "wait-servers", "node trainer", "end"):
        assert f"-m launch.slurm {asked} " in commands


def test_it_trains_on_three_nodes_with_tensor_parallelism_over_two_of_them(interrupted):
    assert interrupted.exit_code() == 0, interrupted.report()
    assert interrupted.last_line() == f"DONE: step 6 of 6 in {interrupted.run_folder.path}"
    assert "TP 2, PP 1, DP 1" in interrupted.log() and "2 ranks (2 nodes x 1)" in interrupted.log()
    assert_it_trained(interrupted, server_node="node3")


def assert_it_trained(job, server_node: str) -> None:
    assert all(0 < line["reward/mean"] < 1 for line in job.metrics())
    assert (job.run_folder.path / "servers.txt").read_text().startswith(f"http://{server_node}:")
    # after every push the server computes the trainer's log-probs: the bound is explained in tests/e2e/test_program.py
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 for line in job.metrics() if "actor/rollout_kl" in line)
    latest = (job.run_folder.logs / "latest").resolve()
    assert len(list(latest.glob("trainer-rank-*.log"))) == 2

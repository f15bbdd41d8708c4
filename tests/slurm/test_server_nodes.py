"""A job whose server is on two nodes with networks of their own: it trains, also after a follower
and a leader were killed, and leaves nothing."""

import re

import pytest

from tests.proofs import proof

pytestmark = [pytest.mark.slurm, proof]

SERVER = "actor_rollout_ref.rollout.server"
PROGRAM = "megatron_dapo.servers.keyed_sglang"


def test_a_server_over_two_nodes_trains_and_is_restarted_whole_after_a_kill_on_either(cluster):
    job = cluster.submit(
        "two_nodes",
        "trainer.total_training_steps=8",
        f"{SERVER}.num_servers=1",
        f"{SERVER}.nodes_per_server=2",
        f"{SERVER}.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.max_retries=20",
        flags=("--nodes=3",),
        SERVER_NODES="2",
    )
    for num_steps, rank in ((2, "1"), (4, "0")):
        job.wait_for_steps(num_steps)
        killed = next(p for p in job.processes(PROGRAM, "--node-rank", rank) if leads_its_family(p))
        killed.kill()
    assert job.exit_code() == 0, job.report()
    assert [line["step"] for line in job.metrics()] == list(range(1, 9))
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 for line in job.metrics() if "actor/rollout_kl" in line)
    urls = (job.run_folder.path / "servers.txt").read_text().splitlines()
    assert len(urls) == 1 and re.fullmatch(r"http://node2:\d+", urls[0]), "the leader's alone"
    leader, follower = (job.attempt_log(0, f"servers-{node}") for node in ("node2", "node3"))
    assert "server-node2-0-node-1 was killed by SIGKILL" in follower
    assert "restart 2 of 3" in leader and "restart 3 of 3" not in leader
    assert follower.count("server-node2-0-node-1 starts") == 3, "one process per start of the leader's"
    assert "http://" not in follower and job.leaves_nothing()


def leads_its_family(process) -> bool:
    """Whether it is the server's own process: its schedulers have its command line."""
    parent = process.parent()
    return parent is None or PROGRAM not in parent.cmdline()

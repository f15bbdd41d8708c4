"""`sbatch slurm/demo.sh`: the demo's training over nodes with networks of their own,
and its incidents.

Of each incident: exit code; the last line of the log, with the cause; no step and no process left;
no requeue without need.

To save starts of servers a job goes through several of these things, in the order of its class. The
classes share nothing: `make test` has several workers run them.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from launch.local import main
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.proofs import proof

pytestmark = pytest.mark.slurm

SERVER = "actor_rollout_ref.rollout.server"


def assert_it_trained(job, server_node: str) -> None:
    assert all(0 < line["reward/mean"] < 1 for line in job.metrics())
    assert (job.run_folder.path / "servers.txt").read_text().startswith(f"http://{server_node}:")
    # after every push the server computes the trainer's log-probs:
    # the bound is explained in tests/e2e/test_program.py
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 for line in job.metrics() if "actor/rollout_kl" in line)
    latest = (job.run_folder.logs / "latest").resolve()
    assert len(list(latest.glob("trainer-rank-*.log"))) == 2


def saved_line(job, step: int, total: int) -> str:
    """A stopped job's words, as a regular expression: it may have been sampling,
    and keeps those groups too."""
    folder = re.escape(str(job.run_folder.path))
    return rf"SAVED: step {step} of {total}(, and \d+ groups of the next one,)? is saved in {folder}"


# Stands for apptainer, which runs a command in an image: notes the command and runs it here.
APPTAINER = """#!/bin/bash
while [[ $1 != image.sif ]]; do shift; done
shift
echo "$*" >>"${0%/*}/contained"
exec "$@"
"""


class TestOnThreeNodesWithTensorParallelismOverTwoInAContainer:
    """Four steps with a server on the third node. After the first comes Slurm's signal
    before the limit."""

    @pytest.fixture(scope="class")
    @classmethod
    def programs(cls, cluster) -> Path:
        folder = cluster.folder / "programs"
        folder.mkdir()
        (folder / "apptainer").write_text(APPTAINER)
        (folder / "apptainer").chmod(0o755)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, cluster, programs):
        job = cluster.submit(
            "interrupted",
            "trainer.total_training_steps=4",
            "trainer.dump_batches=true",
            flags=("--nodes=3",),
            TRAINER_NODES="2",
            RANKS_PER_NODE="1",
            CONTAINER="apptainer",
            IMAGE="image.sif",
            PATH=f"{programs}:{os.environ['PATH']}",
        )
        job.wait_for_steps(1)
        job.signal("USR1")
        job.exit_code()
        return job

    def test_it_trains_to_the_end(self, job):
        assert job.exit_code() == 0, job.report()
        assert job.last_line() == f"DONE: step 4 of 4 in {job.run_folder.path}"
        assert "TP 2, PP 1, DP 1" in job.log() and "2 ranks (2 nodes x 1)" in job.log()
        assert_it_trained(job, server_node="node3")

    def test_usr1_in_mid_run_saves_requeues_and_goes_on_at_the_saved_step(self, job):
        assert job.fact("Restarts") == "1" and job.leaves_nothing()
        saved = job.saved_step()
        sentence = f"{saved_line(job, saved, 4)}; requeued on USR1, restart 1 of at most 20"
        assert re.fullmatch(sentence, job.last_lines()[0]) and 1 <= saved < 4
        assert f"Resumed after step {saved} from" in job.attempt_log(1, "trainer-node1")
        assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]

    def test_its_metrics_are_those_of_an_undisturbed_run_on_the_same_batches_bit_for_bit(self, job, tmp_path):
        on_one_machine = {
            "trainer.run_dir": tmp_path / "run",
            "trainer.log_dir": "null",
            "trainer.nnodes": 1,
            "trainer.n_procs_per_node": 2,
            f"{SERVER}.nnodes": 0,
            "actor_rollout_ref.rollout.server_urls_file": "null",
            "trainer.replay": job.run_folder.batches,
        }
        overrides = [f"{key}={value}" for key, value in on_one_machine.items()]
        run_here(main, "--config", str(job.attempt() / "config.yaml"), *overrides)
        undisturbed = [json.loads(line) for line in RunFolder(tmp_path / "run").metrics.read_text().splitlines()]
        assert len(undisturbed) == 4
        for actual, expected in zip(job.metrics(), undisturbed, strict=True):
            same = {name for name in actual.keys() & expected.keys() if not name.startswith(("time", "perf"))}
            assert {"actor/loss", "actor/grad_norm", "reward/mean"} <= same
            assert {name: actual[name] for name in same} == {name: expected[name] for name in same}

    def test_its_tensorboard_is_one_run(self, job):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(job.run_folder.tensorboard)).Reload()
        assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]

    def test_all_that_runs_python_runs_in_the_container(self, job, programs):
        commands = (programs / "contained").read_text()
        for asked in ("plan --config", "node preflight", "node servers", "wait-servers", "node trainer", "end"):
            assert f"-m launch.slurm {asked} " in commands

    def test_the_same_command_finds_that_nothing_is_left_to_do(self, job, cluster):
        again = cluster.submit("interrupted", "trainer.total_training_steps=4")
        assert again.exit_code() == 0, again.report()
        assert again.last_line() == f"DONE: step 4 of 4 in {job.run_folder.path} already; nothing is left to do"
        assert not again.attempt().exists() and again.leaves_nothing()


@proof
class TestNodesAreTakenAway:
    """After one step another job takes all nodes for a moment; after the next a node is set down.
    The job goes on on other nodes, and is cancelled there in mid-run."""

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, cluster):
        job = cluster.submit("taken", "trainer.total_training_steps=1000", "trainer.save_interval=1")
        job.wait_for_steps(1)
        cluster.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
        cls._wait_until_it_resumed(job, 1)
        cluster.set_node("node2", "down")
        cls._wait_until_it_resumed(job, 2)
        cluster.set_node("node2", "resume")
        return job

    @staticmethod
    def _wait_until_it_resumed(job, number: int) -> None:
        resumed = f"attempt {number} has resumed"
        job.wait(lambda: "Resumed after step" in job.attempt_log(number, "trainer-node1"), resumed)
        job.wait_for_steps(len(job.metrics()) + 1)

    def test_a_preemption_saves_and_requeues_and_the_servers_serve_until_then(self, job):
        first, *_ = job.last_lines()
        assert first.startswith("SAVED: step ") and first.endswith("; requeued on TERM, restart 1 of at most 20")
        saved = int(re.match(r"SAVED: step (\d+)", first)[1])
        assert saved >= 1 and f"Resumed after step {saved} from" in job.attempt_log(1, "trainer-node1")
        assert "restart" not in job.attempt_log(0, "servers-node2")

    def test_without_a_node_the_attempt_ends_and_the_job_goes_on_on_other_nodes(self, job):
        _, second, _ = job.last_lines()
        assert second == "FAILED (143): Slurm took the job from its nodes during trainer: node2 is down"
        assert job.fact("NodeList") == "node[1,3]"
        saved = int(re.search(r"Resumed after step (\d+) from", job.attempt_log(2, "trainer-node1"))[1])
        steps = [line["step"] for line in job.metrics()]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > saved

    def test_scancel_ends_the_job_for_good(self, job):
        job.cancel()
        assert job.exit_code() == 143
        assert job.fact("JobState") == "CANCELLED" and job.fact("Restarts") == "2"
        assert job.last_line().startswith("FAILED (143): the job was cancelled")
        assert job.leaves_nothing()


@proof
class TestAChainOfTwoJobs:
    """In the first one trainer and servers share a node's GPUs, a reward worker hangs on the first
    response, and after two steps its time is nearly up. The second has a node for the server, which
    is killed, and then a trainer rank on the second of two nodes."""

    @pytest.fixture(scope="class")
    @classmethod
    def chain(cls, cluster):
        hung = json.dumps({"has_hung": str(cluster.folder / "has_hung")})
        overrides = (
            "trainer.total_training_steps=1000",
            "actor_rollout_ref.rollout.dump_samples=100",
            "reward.function=tests.slurm.hanging_reward:score",
            f"reward.kwargs={hung}",
            "reward.timeout_s=2",
        )
        shared = ("actor_rollout_ref.hybrid_engine=true", f"{SERVER}.num_servers=2")
        flags = ("--job-name=chain", "--dependency=singleton")
        on_one, apart = {"SERVER_NODES": "0"}, {"TRAINER_NODES": "2", "RANKS_PER_NODE": "1"}
        return [
            cluster.submit("chain", *overrides, *more, flags=(*flags, f"--nodes={nodes}"), REQUEUE="off", **roles)
            for more, nodes, roles in ((shared, 1, on_one), ((), 3, apart))
        ]

    def test_a_reward_worker_that_hangs_costs_one_sample(self, chain):
        first, second = chain
        first.wait_for_steps(2)
        assert [line["reward/num_timeouts"] for line in first.metrics()[:2]] == [1, 0]
        assert "timeout" in first.attempt_log(0, "controller")
        for line in first.metrics():
            assert line["weight_sync/num_servers"] == 2 and line["weight_sync/moved_gb"] > 0, "they took turns"
        assert second.fact("JobState") == "PENDING"

    def test_near_its_time_limit_a_job_saves_and_the_next_one_goes_on(self, chain):
        first, second = chain
        first.shorten()
        assert first.exit_code() == 85, first.report()
        step = len(first.metrics())
        sentence = f"{saved_line(first, step, 1000)}; the same command resumes it"
        assert re.fullmatch(sentence, first.last_lines()[0]) and "] USR1: the trainer saves" in first.log()
        assert first.fact("Restarts") == "0" and first.leaves_nothing()
        second.wait_for_steps(step + 1)
        assert f"Resumed after step {step} from" in second.attempt_log(0, "trainer-node1")

    def test_a_killed_server_is_restarted_gets_the_weights_and_the_run_continues(self, chain):
        job = chain[1]
        done = len(job.metrics())
        [server] = job.processes("megatron_dapo.servers.keyed_sglang")
        server.kill()
        job.wait_for_steps(done + 3)
        assert "restart 1 of" in job.attempt_log(0, "servers-node3")
        for line in job.metrics():
            assert job.weight_versions(line["step"]) <= {line["step"] - 2, line["step"] - 1}
            assert line.get("actor/rollout_abs_diff_max", 0) < 5e-4

    def test_a_killed_trainer_rank_is_named_and_not_its_peer_on_the_other_node(self, chain):
        job = chain[1]
        [rank] = [process for process in job.processes("launch.rank") if process.environ().get("RANK") == "1"]
        rank.kill()
        assert job.exit_code() == 12, job.report()
        assert job.last_line().startswith("FAILED (12): rank 1 on node2 was killed by SIGKILL; see ")
        assert str(job.attempt() / "trainer-rank-1.log") in job.last_line()
        assert job.fact("Restarts") == "0"
        assert job.leaves_nothing()


class TestItDoesNotGetToTheTrainer:
    def test_a_server_that_never_gets_healthy_fails_the_job(self, cluster):
        job = cluster.submit("unhealthy", f"{SERVER}.startup_timeout_s=2", f"{SERVER}.max_restarts=0")
        assert job.exit_code() == 11, job.report()
        assert job.last_line().startswith("FAILED (11): ") and "node2" in job.last_line()
        assert f"{job.attempt()}" in job.last_line()
        assert job.fact("Restarts") == "0" and not list(job.attempt().glob("trainer-*"))
        assert job.leaves_nothing()

    def test_a_preflight_that_fails_on_one_node_names_it_and_nothing_starts(self, cluster):
        """The run folder of that node is another one: its file system is not mounted there."""
        (cluster.folder / "unseen").mkdir()
        cluster.on("node2", "mount", "-t", "tmpfs", "tmpfs", str(cluster.folder / "unseen"))
        job = cluster.submit("unseen")
        assert job.exit_code() == 10, job.report()
        assert job.last_line().startswith("FAILED (10): ") and "node2" in job.last_line()
        assert job.fact("Restarts") == "0" and not list(job.attempt().glob("servers-*"))
        assert job.leaves_nothing()
        cluster.on("node2", "umount", str(cluster.folder / "unseen"))

    @proof
    def test_gpus_that_slurm_counts_and_torch_does_not_see_fail_the_preflight(self, cluster):
        job = cluster.submit("no-gpus", flags=("--gpus-per-node=2",))
        assert job.exit_code() == 10, job.report()
        text = "Slurm gives it GPUs, but its torch" if torch.version.cuda is None else "offers 0 GPUs, the config needs"
        assert re.match(rf"FAILED \(10\): preflight: node[12]: {text}", job.last_line())
        assert job.leaves_nothing()

    def test_more_ranks_than_gpus_are_refused_before_anything_starts(self, cluster):
        job = cluster.submit("few-gpus", flags=("--gpus-per-node=1",))
        assert job.exit_code() == 2, job.report()
        assert "n_procs_per_node is 2, but Slurm gave 1 GPUs per node" in job.last_line()
        assert not job.attempt().exists() and job.leaves_nothing()

"""A run whose server is two processes of a tensor-parallel group, as on two nodes: pushes,
log-probs, a killed leader and a killed follower, resume."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from examples.arithmetic.problems import BASE, write_files
from launch.local import main
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE
from megatron_dapo.data.samples import Group
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.servers.run_servers import RunServers
from megatron_dapo.servers.server_health import UNAVAILABLE, HealthCheck, health_status
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import key_header, read_server_key
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.e2e.test_shared_gpus_run import seen_servers
from tests.forked_local import run_here
from tests.helpers import REPOSITORY
from tests.proofs import proof
from tests.unit.test_launch import is_alive

pytestmark = pytest.mark.e2e

DEMO = ("--config", str(REPOSITORY / "configs" / "demo.yaml"))
SERVER = "actor_rollout_ref.rollout.server"
ENDLESS = 10_000
"""Steps of a run that is stopped a step after the last kill."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("data"))[0]


def keys(prompts: Path, run: RunFolder, num_steps: int, num_servers: int = 1, num_nodes: int = 2) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={BASE}",
        f"data.train_files=[{prompts}]",
        "data.train_batch_size=4",
        "data.gen_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "algorithm.dynamic_sampling.enable=false",
        # a kill costs a request one of its tries, and a new process its whole start
        "actor_rollout_ref.rollout.max_retries=20",
        "weight_sync.verify_num_tensors=10000",
        f"{SERVER}.num_servers={num_servers}",
        f"{SERVER}.nodes_per_server={num_nodes}",
        f"{SERVER}.tensor_model_parallel_size=2",
        f"{SERVER}.max_restarts=100",
        "trainer.n_procs_per_node=2",
        f"trainer.total_training_steps={num_steps}",
        "trainer.logger=[jsonl]",
        f"trainer.run_dir={run.path}",
    ]


def trained(run: RunFolder) -> list[dict]:
    return [line for line in read_metrics(run.metrics) if "actor/loss" in line] if run.metrics.exists() else []


def num_left_out(run: RunFolder, url: str) -> int:
    """How often a push began with this server and ended without it. One that was dead before does
    not come as far as to be paused, and then to open a session."""
    log = run.log("trainer-rank-0")
    text = log.read_text(errors="replace") if log.exists() else ""
    server = re.escape(url)
    opening = rf"weight sync: pause: left out [^\n]*{server}, /(?:begin|end)_weight_update\b"
    later = rf"weight sync: (?:(?:commit|verify|resume): )?left out [^;\n]*{server}\b"
    return len(re.findall(f"{opening}|{later}", text))


@dataclass(frozen=True)
class Kill:
    """A SIGKILL to one of a server's processes: 0 the leader, 1 the follower."""

    rank: int
    in_push: bool
    server: int = 0


class Killer(threading.Thread):
    """Kills as told, each after a step by all servers, and in a push until one left the server out;
    then has the run stop."""

    def __init__(self, run: RunFolder, servers: list[RunServers], num_servers: int, kills: Sequence[Kill]) -> None:
        super().__init__(daemon=True)
        self._run, self._servers, self._num_servers, self._kills = run, servers, num_servers, kills
        self._num_steps = 0
        """At the last kill, with the step under way."""
        self.num_done = 0
        """With those that came after the end of a push."""
        self.family: set[psutil.Process] = set()
        """The processes of all servers that were seen at work."""
        self.over = threading.Event()

    def run(self) -> None:
        try:
            for kill in self._kills:
                while not self._does(kill):
                    continue
            self._wait(self._are_all_served)
            self._note_family()
        finally:  # a run without its killer would never end
            self._run.stop.touch()

    def _does(self, kill: Kill) -> bool:
        """Kill; return whether it came at the moment that was told."""
        self._wait(self._are_all_served)
        self._note_family()
        num_before = self._num_left_out(kill)
        if kill.in_push:
            self._wait(lambda: self._is_paused(kill.server))
        if self.over.is_set():
            return True
        os.kill(self._servers[0].pids()[kill.rank * self._num_servers + kill.server], signal.SIGKILL)
        self.num_done += 1
        self._num_steps = len(trained(self._run)) + 1
        if kill.in_push:
            self._wait(lambda: self._num_left_out(kill) > num_before or self._are_all_served())
        return not kill.in_push or self.over.is_set() or self._num_left_out(kill) > num_before

    def _num_left_out(self, kill: Kill) -> int:
        return num_left_out(self._run, self._servers[0].urls[kill.server]) if self._servers else 0

    def _note_family(self) -> None:
        for pid in self._servers[0].pids() if self._servers else ():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                self.family |= {process, *process.children(recursive=True)}

    def _are_all_served(self) -> bool:
        """Whether a step after the last kill had all servers."""
        steps = trained(self._run)
        return len(steps) > self._num_steps and steps[-1]["weight_sync/num_servers"] == self._num_servers

    def _is_paused(self, number: int) -> bool:
        """Whether a push has begun at a server at work."""
        headers = key_header(read_server_key(self._servers[0].key_file))
        return health_status(self._servers[0].urls[number], HealthCheck.TAKES_REQUESTS, headers, 1.0) == UNAVAILABLE

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not self.over.is_set() and not condition():
            time.sleep(0.01)


def run_with_kills(prompts: Path, run: RunFolder, kills: Sequence[Kill], num_servers: int = 1) -> list[dict]:
    """The steps of a run that goes on after all of the kills."""
    with seen_servers() as made:
        killer = Killer(run, made, num_servers, kills)
        killer.start()
        try:
            code = main([*DEMO, *keys(prompts, run, ENDLESS, num_servers)])
        finally:
            killer.over.set()
            killer.join()
    assert code == SAVED_EXIT_CODE and killer.num_done >= len(kills)
    assert len(killer.family) >= 2 * (num_servers + len(kills)) and not any(map(is_alive, killer.family))
    steps = trained(run)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for line in steps:
        # the bound is explained in test_program.py
        assert line["actor/rollout_abs_diff_max"] < 5e-4 or "actor/rollout_kl" not in line
    log = run.log("launch").read_text()
    num_restarts = len(re.findall(r"; restart \d+ of 100", log))
    # a server's other process ends with it, and that is no further restart
    assert num_restarts == killer.num_done, log
    for number, url in enumerate(made[0].urls):
        assert num_left_out(run, url) >= sum(kill.in_push for kill in kills if kill.server == number)
        num_starts = log.count(f"server-{number} starts at")
        for name in (f"server-{number}", f"server-{number}-node-1"):
            assert run.log(name).read_text(errors="replace").count("Load weight end") == num_starts, name
    num_lost = log.count("lost a process: ")
    print(f"{len(steps)} steps, {num_restarts} restarts, {num_lost} of them by the word of a follower's supervisor")
    return steps


def test_a_run_goes_on_after_a_follower_is_killed_in_a_step_and_a_leader_in_a_push_and_is_resumed(prompts, tmp_path):
    run = RunFolder(tmp_path / "run")
    steps = run_with_kills(prompts, run, [Kill(rank=1, in_push=False), Kill(rank=0, in_push=True)])
    assert steps[0]["actor/rollout_abs_diff_max"] > 0, "it was compared"
    run_here(main, *DEMO, *keys(prompts, run, len(steps) + 1))
    assert [line["step"] for line in trained(run)] == list(range(1, len(steps) + 2))
    assert f"Resumed after step {len(steps)}" in run.log("checkpoints").read_text()


@proof
def test_a_leader_and_a_follower_are_killed_in_a_step_and_in_a_push_beside_another_server(prompts, tmp_path):
    kills = [Kill(rank, in_push, server) for in_push in (False, True) for rank in (0, 1) for server in (0, 1)]
    steps = run_with_kills(prompts, RunFolder(tmp_path / "run"), kills, num_servers=2)
    assert {line["weight_sync/num_servers"] for line in steps} == {1, 2}, "the other one goes on"


@proof
def test_the_same_server_killed_again_and_again_is_restarted_each_time(prompts, tmp_path):
    kills = [Kill(number % 2, in_push=number % 3 == 0) for number in range(12)]
    run_with_kills(prompts, RunFolder(tmp_path / "run"), kills)


def groups_of(run: RunFolder, step: int) -> list[Group]:
    """The step's groups with all tokens and log-probs, without the names of their servers."""
    groups = read_batch(run.batches, step).groups
    return [replace(each, samples=tuple(replace(sample, servers=()) for sample in each.samples)) for each in groups]


@proof
def test_it_samples_and_trains_as_a_server_of_one_process(prompts, tmp_path):
    """The same ranks compute the same, whoever started them."""
    runs = [RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")]
    for num_nodes, run in enumerate(runs, start=1):
        more = ["actor_rollout_ref.rollout.deterministic=true", "trainer.dump_batches=true"]
        run_here(main, *DEMO, *keys(prompts, run, 3, num_nodes=num_nodes), *more)
    assert [run.log("server-0-node-1").exists() for run in runs] == [False, True]
    for one, two in zip(*map(trained, runs), strict=True):
        assert groups_of(runs[0], one["step"]) == groups_of(runs[1], one["step"])
        for name in ("actor/loss", "actor/grad_norm", "actor/rollout_abs_diff_max"):
            assert one[name] == two[name], f"{name} of step {one['step']}"

"""A training run with server kills on the way, and its invariants."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.trainer_ranks import TrainerRanks, trainer_command
from megatron_dapo.common.ends import EndFolder
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import make_server_key
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.forked_ranks import fork_server
from tests.helpers import free_port

POLL_S = 0.02


class Servers(Protocol):
    """As ServerSupervisor: check restarts the dead."""

    urls: list[str]

    def start(self) -> None: ...
    def check(self) -> bool: ...
    def pids(self) -> list[int]: ...
    def stop(self) -> None: ...


class StandIns:
    """Server processes without a model (tests/distributed/weight_sync_server.py), forked from one
    with all imports done. A dead one is started again at its URL after a while, drawn with a fixed
    seed, as if it had to load."""

    def __init__(self, number: int, restart_s: tuple[float, float] = (0.3, 1.5)) -> None:
        self._context = fork_server()
        first = free_port(number)
        self._ports = list(range(first, first + number))
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self._processes: list = []
        self._restart_s, self._random = restart_s, random.Random(11)
        self._due: dict[int, float] = {}

    def start(self) -> None:
        self._processes = [self._started(port) for port in self._ports]

    def check(self) -> bool:
        """Restart the due ones. True if all live."""
        for number, process in enumerate(self._processes):
            if process.is_alive():
                continue
            due = self._due.setdefault(number, time.monotonic() + self._random.uniform(*self._restart_s))
            if time.monotonic() >= due:
                self._processes[number] = self._started(self._ports[number])
                del self._due[number]
        return not self._due

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.is_alive()]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _started(self, port: int):
        from tests.distributed import weight_sync_server

        process = self._context.Process(target=weight_sync_server.serve, args=(port, {}), daemon=True)
        process.start()
        return process


@dataclass
class Kills:
    """number SIGKILLs to random servers, at random moments of the steps
    after `first` until `last`."""

    number: int
    first: int
    last: int
    longest_wait_s: float
    seed: int = 6

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._moments = [self._moment(i) for i in range(self.number)]
        self.done: list[float] = []  # when
        self._due: float | None = None

    def _moment(self, number: int) -> tuple[int, float]:
        """(steps that are done, seconds after that)."""
        step = self.first + number * (self.last - self.first) // self.number
        return step, self._random.uniform(0.0, self.longest_wait_s)

    def look(self, num_steps: int, pids: Sequence[int]) -> None:
        """Kill, if it is time for the next one; num_steps are done."""
        if len(self.done) == self.number:
            return
        step, wait_s = self._moments[len(self.done)]
        now = time.monotonic()
        if num_steps > step:  # steps overtook it: at once, so that a fast run has all of them
            self._due = now
        elif num_steps == step and self._due is None:
            self._due = now + wait_s
        if self._due is None or now < self._due or not pids:
            return
        os.kill(self._random.choice(list(pids)), signal.SIGKILL)
        self.done.append(time.monotonic())
        self._due = None


def train(config: Config, servers: Servers, look: Callable[[int], bool | None] = lambda _: None) -> int:
    """Train with these servers, started here and named in servers.txt of the run folder; the
    trainer's exit code. look(steps done) is called all the time; once it says True the servers are
    stopped for good."""
    run = RunFolder.of(config.trainer).create()
    config_file, urls_file = run.logs / "config.yaml", run.path / "servers.txt"
    write_whole(config_file, to_yaml(config))
    write_whole(urls_file, "".join(f"{url}\n" for url in servers.urls))
    server_keys = {"server_urls_file": urls_file, "server_api_key_file": make_server_key(config)}
    overrides = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in server_keys.items()]
    ranks = TrainerRanks(config, run, trainer_command(str(config_file), overrides), EndFolder(run.ends, start=""))
    are_lost = False
    try:
        servers.start()
        ranks.start()
        while (code := ranks.check()) is None:
            if not are_lost and look(num_lines(run.metrics)):
                are_lost = True
                servers.stop()
            if not are_lost:
                servers.check()
            time.sleep(POLL_S)
        return code
    finally:
        ranks.stop()
        servers.stop()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@dataclass(frozen=True)
class Accounts:
    """The account of a run's draws, from its dumped batches and its metrics."""

    num_trained: int
    num_filtered: int
    num_left: int
    num_drawn: int


def check_accounts(config: Config, num_steps: int) -> Accounts:
    """Every uid was trained exactly n times, none lost or doubled. No token is older than
    `max_staleness` allows, or newer than the version of the step's request."""
    run, n = RunFolder.of(config.trainer), config.actor_rollout_ref.rollout.n
    records = {record["step"]: record for record in read_metrics(run.metrics) if "actor/loss" in record}
    assert sorted(records)[:num_steps] == list(range(1, num_steps + 1))
    seen: set[str] = set()
    totals = dict.fromkeys(("dapo/num_gen_batches", "dapo/num_kept_groups", "dapo/num_filtered_groups"), 0.0)
    surplus = 0
    max_staleness = config.actor_rollout_ref.rollout.max_staleness
    for step in range(1, num_steps + 1):
        groups = read_batch(run.batches, step).groups
        assert 0 < len(groups) <= config.data.train_batch_size
        for group in groups:
            assert group.uid not in seen, f"{group.uid} is trained twice"
            seen.add(group.uid)
            assert len(group.samples) == n and all(sample.uid == group.uid for sample in group.samples)
            versions = {version for sample in group.samples for version in sample.weight_versions}
            assert versions <= set(range(step - 1 - max_staleness, step))
        for name in totals:
            totals[name] += records[step][name]
        surplus += int(records[step]["dapo/num_kept_groups"]) - len(groups)
    gen_batch_size = config.data.gen_batch_size or config.data.train_batch_size
    drawn = round(totals["dapo/num_gen_batches"] * gen_batch_size)
    accounts = Accounts(len(seen), int(totals["dapo/num_filtered_groups"]), surplus, drawn)
    assert accounts.num_trained + accounts.num_filtered + accounts.num_left == accounts.num_drawn, accounts
    assert max(int(uid.partition("-")[0]) for uid in seen) < drawn, "a draw that no gen batch counts"
    return accounts


def fingerprints(config: Config, num_steps: int) -> dict[int, set[float]]:
    """Weight version -> the log-probs of its tokens, which a stand-in takes from its weights."""
    run, by_version = RunFolder.of(config.trainer), {}
    for step in range(1, num_steps + 1):
        for group in read_batch(run.batches, step).groups:
            for sample in group.samples:
                pairs = zip(sample.weight_versions.tolist(), sample.rollout_log_probs.tolist(), strict=True)
                for version, log_prob in pairs:
                    by_version.setdefault(version, set()).add(log_prob)
    return by_version

"""A run whose trainer and servers use the same GPUs in turns, on imagined GPUs of a CPU."""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest

from examples.arithmetic.problems import BASE, write_files
from launch.local import main
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE
from megatron_dapo.servers.run_servers import RunServers
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.forked_local import forks, run_here
from tests.helpers import REPOSITORY
from tests.proofs import amount, few, proof

pytestmark = pytest.mark.e2e

DEMO = ("--config", str(REPOSITORY / "configs" / "demo.yaml"))
NUM_STEPS = 4
NUM_KILLED_STEPS = amount(1, 50)  # at least, and a kill in each phase
SERVER = "actor_rollout_ref.rollout.server"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[Path, Path]:
    """Prompts to train on, and those held out."""
    return write_files(tmp_path_factory.mktemp("data"))


def keys(data: tuple[Path, Path], run: RunFolder, num_steps: int) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={BASE}",
        f"data.train_files=[{data[0]}]",
        "data.train_batch_size=4",
        "data.gen_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "algorithm.dynamic_sampling.enable=false",
        "weight_sync.verify_num_tensors=10000",
        f"trainer.total_training_steps={num_steps}",
        "trainer.logger=[jsonl]",
        f"trainer.run_dir={run.path}",
    ]


def trained(run: RunFolder) -> list[dict]:
    """The records of the trained steps."""
    return [line for line in read_metrics(run.metrics) if "actor/loss" in line]


SHARED = ["actor_rollout_ref.hybrid_engine=true", f"{SERVER}.num_servers=2"]


@pytest.fixture(scope="module")
def shared(data, tmp_path_factory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("shared") / "run")
    more = [f"data.val_files=[{data[1]}]", "trainer.test_freq=2", "trainer.save_interval=2"]
    run_here(main, *DEMO, *keys(data, run, NUM_STEPS), *SHARED, *more, "trainer.dump_batches=true")
    return run


def test_every_push_is_verified_and_every_step_is_trained(shared):
    steps = trained(shared)
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    for line in steps:
        assert line["weight_sync/num_servers"] == 2 and line["weight_sync/num_rejoins"] == 0
        assert line["weight_sync/moved_gb"] > 0 and line["weight_sync/sleep_s"] > 0 and line["weight_sync/wake_s"] > 0
        assert line["rollout/staleness_max"] == 0
    validations = [line["step"] for line in read_metrics(shared.metrics) if "val/accuracy" in line]
    assert validations == [0, 2, 4]
    assert sorted(path.name for path in shared.checkpoints.iterdir()) == ["step_000002", "step_000004"]


def test_its_weights_are_those_of_the_same_batches_on_gpus_of_their_own(shared, data, tmp_path):
    """The replay trains on the recorded batches, without a server: nothing sleeps or is parked."""
    replayed = RunFolder(tmp_path / "replayed")
    run_here(main, *DEMO, "--replay", str(shared.batches), *keys(data, replayed, NUM_STEPS))
    for in_turns, split in zip(trained(shared), trained(replayed), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert in_turns[name] == split[name], f"{name} of step {split['step']}"
    for name in ("model.safetensors",):
        assert (shared.model / name).read_bytes() == (replayed.model / name).read_bytes()


def held(folder: Path, killed: Sequence[tuple[int, float]] = ()) -> Iterator[tuple[str, dict[tuple[str, str], int]]]:
    """Replay the accounts of each GPU: (GPU, (holder, what) -> bytes) after each entry. killed:
    process and moment; the dead hold nothing."""
    for path in sorted(folder.glob("*.jsonl")):
        balance: dict[tuple[int, str, str], int] = defaultdict(int)
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            gone = {pid for pid, moment in killed if moment < entry["time"]}
            balance = defaultdict(int, {key: value for key, value in balance.items() if key[0] not in gone})
            balance[entry["pid"], entry["holder"], entry["what"]] += entry["bytes"]
            now: dict[tuple[str, str], int] = defaultdict(int)
            for (_, holder, what), num_bytes in balance.items():
                now[holder, what] += num_bytes
            yield path.stem, now


def check_never_two_awake(accounts: Iterator[tuple[str, dict[tuple[str, str], int]]]) -> int:
    """Check each moment; return their number.

    Servers have a cache, and so sample, only while the trainer has nothing. While the trainer has
    gradients or an optimizer, and so trains, the servers have nothing.
    """
    number = 0
    for gpu, now in accounts:
        trainer = {what: num_bytes for (holder, what), num_bytes in now.items() if holder == "trainer" and num_bytes}
        server = {what: num_bytes for (holder, what), num_bytes in now.items() if holder == "server" and num_bytes}
        assert not ("kv_cache" in server and trainer), f"{gpu}: {server} beside {trainer}"
        assert not (trainer.keys() - {"weights"} and server), f"{gpu}: {server} beside {trainer}"
        number += 1
    return number


def test_never_two_are_awake_on_a_gpu(shared):
    # two servers and two ranks: asleep and awake, parked and restored in each step
    assert check_never_two_awake(held(shared.ledger)) > 2 * 8 * NUM_STEPS
    last = {gpu: now for gpu, now in held(shared.ledger)}
    assert set(last) == {"gpu0", "gpu1"}


@pytest.mark.parametrize("holder", ["trainer", "server"])
def test_one_that_keeps_its_memory_is_seen_in_the_accounts(shared, holder, tmp_path):
    for path in shared.ledger.glob("*.jsonl"):
        entries = map(json.loads, path.read_text().splitlines())
        kept = [entry for entry in entries if entry["bytes"] > 0 or entry["holder"] != holder]
        (tmp_path / path.name).write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    with pytest.raises(AssertionError, match="beside"):
        check_never_two_awake(held(tmp_path))


@contextmanager
def seen_servers() -> Iterator[list[RunServers]]:
    """The servers that a launcher makes inside the block, as forks like its ranks."""
    made: list[RunServers] = []
    make = RunServers.of

    def of(*arguments, **options) -> RunServers:
        made.append(make(*arguments, **options))
        return made[-1]

    with mock.patch.object(RunServers, "of", of), forks(), mock.patch.dict(os.environ):
        yield made


ADAPTERS = ["actor_rollout_ref.model.lora_rank=4"]
CRITIC = [
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
]


@pytest.mark.parametrize("more", few([CRITIC, ADAPTERS], 1), ids=few(["critic and reference", "adapters"], 1))
def test_frozen_weights_a_critic_and_a_reference_leave_the_gpu_too(more, data, tmp_path):
    run = RunFolder(tmp_path / "run")
    run_here(main, *DEMO, *keys(data, run, 2), *SHARED, *more)
    assert [line["weight_sync/num_servers"] for line in trained(run)] == [2, 2]
    assert check_never_two_awake(held(run.ledger)) > 0
    at_last = {gpu: now for gpu, now in held(run.ledger)}
    assert all(now["trainer", "weights"] > 0 for now in at_last.values()), "the model is saved from the GPU"


@proof
def test_when_the_last_server_is_lost_the_step_is_saved_and_a_second_start_goes_on(data, tmp_path):
    """Rescue and resume: the trainer's memory comes back for the save, and is restored before the
    first push."""
    run = RunFolder(tmp_path / "run")

    def kill_all() -> None:
        while not over.wait(0.02):
            if run.metrics.exists() and len(trained(run)) >= 2:
                for pid in made[0].pids():
                    with suppress(psutil.NoSuchProcess):
                        psutil.Process(pid).kill()
                return

    over = threading.Event()
    killer = threading.Thread(target=kill_all)
    limits = [f"{SERVER}.max_restarts=0", f"{SERVER}.startup_timeout_s=40"]
    with seen_servers() as made:
        killer.start()
        try:
            assert main([*DEMO, *keys(data, run, 1000), *SHARED, *limits]) not in (0, SAVED_EXIT_CODE)
        finally:
            over.set()
            killer.join()
    num_steps = len(trained(run))
    assert num_steps >= 2 and run.checkpoint(num_steps).is_dir()
    run_here(main, *DEMO, *keys(data, run, num_steps + 1), *SHARED)
    assert [line["step"] for line in trained(run)] == list(range(1, num_steps + 2))
    assert f"Resumed after step {num_steps}" in run.log("checkpoints").read_text()


class Killer(threading.Thread):
    """Kills a server in each phase of the step, again and again: while servers sample, while memory
    moves to the trainer, while they sleep, and while it moves back."""

    PHASES = (
        (Holder.SERVERS, Holder.MOVING),
        (Holder.MOVING, Holder.TRAINER),
        (Holder.TRAINER, Holder.MOVING),
        (Holder.MOVING, Holder.SERVERS),
    )

    def __init__(self, run: RunFolder, servers: list[RunServers]) -> None:
        super().__init__(daemon=True)
        self._run, self._lease, self._servers = run, LeaseFolder(run.lease), servers
        self._killed_after = 0  # number of steps at the last kill
        self.killed: list[tuple[str, int]] = []
        self.pids: list[tuple[int, float]] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            phase = self.PHASES[len(self.killed) % len(self.PHASES)]
            if self._both_serve() and self._wait_for(phase):
                self._kill(len(self.killed) % 2, phase)
            if len(self.killed) >= len(self.PHASES) and self._both_serve():
                if len(self._steps()) >= NUM_KILLED_STEPS:
                    self._run.stop.touch()
                    return

    def _steps(self) -> list[dict]:
        return trained(self._run) if self._run.metrics.exists() else []

    def _both_serve(self) -> bool:
        """Whether the last step's push, after all kills so far, brought both the weights."""
        self.over.wait(0.05)
        steps = self._steps()
        return len(steps) > self._killed_after and steps[-1]["weight_sync/num_servers"] == 2

    def _wait_for(self, phase: tuple[Holder, Holder]) -> bool:
        before = None
        while not self.over.wait(0.002):
            now = self._lease.read()
            if now.holder is phase[0] and (phase[0] is not Holder.MOVING or before in self._origin(phase)):
                return True
            if now.holder is not Holder.MOVING:
                before = now.holder
        return False

    @staticmethod
    def _origin(phase: tuple[Holder, Holder]) -> tuple[Holder, ...]:
        return (Holder.SERVERS,) if phase[1] is Holder.TRAINER else (Holder.TRAINER,)

    def _kill(self, index: int, phase: tuple[Holder, Holder]) -> None:
        server = psutil.Process(self._servers[0].pids()[index])
        family = [*server.children(recursive=True), server]
        for process in family:
            process.kill()
        self.pids += [(process.pid, time.time()) for process in family]
        self.killed.append((f"{phase[0]} to {phase[1]}", index))
        self._killed_after = len(self._steps()) + 1


def test_a_server_killed_in_any_phase_costs_no_step(data, tmp_path):
    run = RunFolder(tmp_path / "run")
    with seen_servers() as made:
        killer = Killer(run, made)
        killer.start()
        try:
            code = main([*DEMO, *keys(data, run, 1000), *SHARED, f"{SERVER}.max_restarts=1000"])
        finally:
            killer.over.set()
            killer.join()
    assert code == SAVED_EXIT_CODE
    steps = trained(run)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    print(f"{len(steps)} steps: {killer.killed}")
    assert len({phase for phase, _ in killer.killed}) == len(Killer.PHASES), killer.killed
    assert check_never_two_awake(held(run.ledger, killer.pids)) > 0

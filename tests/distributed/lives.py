"""Lives of one training run: a real trainer on stand-in servers, ended at moments counted by these.

The trainer is the user's program, in a process with all imports done. Its controller, its reward
workers and the writers of its checkpoints are processes as always.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import psutil

from megatron_dapo.checkpointing.folders import newest_first, read_controller_state, read_trainer_state
from megatron_dapo.checkpointing.manifest import verify
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder
from tests.distributed.weight_sync_world import Server
from tests.forked_commands import ForkedPopen
from tests.forked_ranks import fork_server
from tests.helpers import TAIL, free_port

LIFE_S = 120.0  # for the end of a life and of all its processes; far above the usual
SAMPLING = ("generate", "token")
PUSHING = ("update_weights_from_distributed",)


@dataclass(frozen=True)
class Moment:
    """The end of a life: a signal to the trainer, at this number of these events in it."""

    events: tuple[str, ...]
    number: int
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.signal.name} at {'/'.join(self.events)} {self.number}"

    def act(self, trainer: int) -> None:
        """Send the signal."""
        os.kill(trainer, self.signal)


def random_moments(number: int, seed: int, longest: int) -> list[Moment]:
    """Ordered stops and kills in equal numbers, mixed. Some kills are in the middle of a push, each
    other moment at a request or a token of the first `longest`."""
    chance = random.Random(seed)
    stops = [Moment(SAMPLING, chance.randint(1, longest), signal.SIGTERM) for _ in range(number // 2)]
    kills = [
        Moment(PUSHING, chance.randint(1, 4), signal.SIGKILL)
        if chance.random() < 0.3
        else Moment(SAMPLING, chance.randint(1, longest), signal.SIGKILL)
        for _ in range(number - len(stops))
    ]
    moments = [*stops, *kills]
    chance.shuffle(moments)
    return moments


class Events:
    """The stand-ins' events, in order of arrival. Acts, once a life,
    as soon as its moment has come."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = list(connections)
        self._lock = threading.Lock()
        self.begin(None, lambda: None)
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, moment: Moment | None, act: Callable[[], None]) -> None:
        """Count anew, for a life that ends at this moment. None: by itself."""
        with self._lock:
            self.requests: list[dict] = []
            self.num_in_flight = 0  # at the moment, once that has come
            self._in_flight: set[str] = set()
            self._events = moment.events if moment else ()
            self._num_left = moment.number if moment else 0
            self._act = act

    def _listen(self) -> None:
        while self._connections:
            for connection in wait(self._connections):
                try:
                    name, body = connection.recv()
                except EOFError:
                    self._connections.remove(connection)
                    continue
                with self._lock:
                    self._take_in(name, body)

    def _take_in(self, name: str, body: dict) -> None:
        if name == "generate":
            self.requests.append(body)
            self._in_flight.add(body["rid"])
        elif name == "end of generate":
            self._in_flight.discard(body["rid"])
        if name in self._events and self._num_left:
            self._num_left -= 1
            if not self._num_left:
                with suppress(ProcessLookupError):  # it failed by itself just now
                    self._act()
                self.num_in_flight = len(self._in_flight)


@dataclass(frozen=True)
class Checkpoint:
    """step: the last finished one; rollout: the saved part of the rollout."""

    step: int
    rollout: dict


@dataclass(frozen=True)
class Life:
    """The record of one life. moment: None if it ended by itself.

    resumed_after: the step that it went on from, by its own words. before and after: the newest
    checkpoint, or None. requests: for responses, as they came to the servers. num_in_flight: of
    these, at the moment.
    """

    moment: Moment | None
    code: int
    resumed_after: int | None
    before: Checkpoint | None
    after: Checkpoint | None
    requests: list[dict]
    num_in_flight: int


class Lives:
    """A run started again and again, on lasting servers."""

    def __init__(self, config: Config, events: Events) -> None:
        self.run = RunFolder.of(config.trainer).create()
        self._events = events
        self._config_file = self.run.logs / "config.yaml"
        write_whole(self._config_file, to_yaml(config))

    def live(self, moment: Moment | None, *overrides: str) -> Life:
        """Start the trainer, and wait for the end of all its processes."""
        before = self._newest_checkpoint()
        self.run.log("checkpoints").unlink(missing_ok=True)
        process = self._start(overrides)
        self._events.begin(moment, lambda: moment.act(process.pid) if moment else None)
        try:
            code = process.wait(LIFE_S)
            wait_for_session(process.pid)
        except (subprocess.TimeoutExpired, AssertionError) as error:
            raise AssertionError(f"a life with {moment}: {error}\n{self.tails()}") from error
        finally:
            requests, num_in_flight = self._events.requests, self._events.num_in_flight
            self._events.begin(None, lambda: None)  # nobody is to be killed any more
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return Life(moment, code, self._resumed_after(), before, self._newest_checkpoint(), requests, num_in_flight)

    def tails(self) -> str:
        return "\n".join(f"--- {log}\n{log.read_text()[-TAIL:]}" for log in sorted(self.run.logs.glob("*.log")))

    def _start(self, overrides: Sequence[str]) -> ForkedPopen:
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        variables = place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        command = [sys.executable, "-m", "megatron_dapo", "train", "--config", str(self._config_file), *overrides]
        with self.run.log("trainer-rank-0").open("ab") as log:
            return ForkedPopen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {name: str(value) for name, value in variables.items()},
                start_new_session=True,
                preexec_fn=None,
            )

    def _resumed_after(self) -> int | None:
        log = self.run.log("checkpoints")
        lines = log.read_text().splitlines() if log.exists() else []
        steps = [int(line.split()[3]) for line in lines if line.startswith("Resumed after step")]
        return steps[0] if steps else None

    def _newest_checkpoint(self) -> Checkpoint | None:
        for folder in newest_first(self.run.checkpoints):
            assert verify(folder).is_whole
            return Checkpoint(read_trainer_state(folder)["step"], read_controller_state(folder))
        return None


def wait_for_session(session: int) -> None:
    """Until all processes of a session have ended by themselves."""
    deadline = time.monotonic() + LIFE_S
    while left := processes_of(session):
        assert time.monotonic() < deadline, f"the trainer left {left}"
        time.sleep(0.02)


def processes_of(session: int) -> list[psutil.Process]:
    """The running ones: after their parent's death some may stay for a while."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


@contextmanager
def stand_ins(number: int) -> Iterator[tuple[list[str], Events]]:
    """Servers that outlive the lives, by URL, and their events."""
    pipes = [fork_server().Pipe(duplex=False) for _ in range(number)]
    servers = [Server(watcher) for _, watcher in pipes]
    try:
        for server in servers:
            server.wait()
        yield [server.url for server in servers], Events([events for events, _ in pipes])
    finally:
        for server in servers:
            server.kill()
        for _, watcher in pipes:
            watcher.close()

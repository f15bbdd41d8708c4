"""SIGKILL to servers of a run: to one until it died in a push of weights, then to another between
two pushes; on shared GPUs to all asleep."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from launch.acceptance.rung import Red, kill_family
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics

_JOINED_A_GROUP = "init custom process group"
"""SGLang's log line when it joins a group of a push, just before the first broadcast in it."""


@dataclass(frozen=True)
class StartedServer:
    """A server in its supervisor's log."""

    name: str
    """Also of its log file."""
    url: str
    pid: int


def was_left_out(trainer_log: Path, url: str) -> bool:
    """Return whether a push left out this URL's server, dead in it, and was repeated. A server down
    at the start of a push, or dead after the last bucket, is left out in another way."""
    text = trainer_log.read_text(errors="replace") if trainer_log.exists() else ""
    return bool(re.search(rf"weight sync: left out [^;\n]*{re.escape(url)}[,;].*the push is repeated", text))


@dataclass
class KillAsleep:
    """Kills all servers of a run on shared GPUs while the trainer has them, after some steps. Call
    `look` continuously."""

    run: RunFolder
    program_log: Path
    num_steps: int
    are_killed: bool = False

    def look(self) -> None:
        """Kill them, if it is time for it."""
        has_trainer = LeaseFolder(self.run.lease).read().holder is Holder.TRAINER
        if self.are_killed or not has_trainer or not self.run.metrics.exists():
            return
        steps = [line for line in read_metrics(self.run.metrics) if "actor/loss" in line]
        if len(steps) >= self.num_steps:
            self.are_killed = True
            text = self.program_log.read_text(errors="replace")
            last_pids = dict(re.findall(r"(server-\d+) starts at \S+ \(pid (\d+)", text)).values()
            for pid in map(int, last_pids):
                os.kill(pid, signal.SIGSTOP)  # none wakes while others are killed
            for pid in map(int, last_pids):
                kill_family(pid)


class ServerKills:
    """Kills servers at moments defined by the run's files. Call `are_over` continuously.

    The last server dies in the first push that reaches it, after joining the groups and before the
    first broadcast. If the push was over before the kill, it dies again in the first push after its
    return, until it died in one. No push without that server shows this. After it has come back,
    the first server dies, after a step's push.
    """

    def __init__(self, run: RunFolder, program_log: Path, num_servers: int, num_groups: int) -> None:
        """Prepare the kills.

        Args:
            run: its folder.
            program_log: the log of the servers' supervisor.
            num_servers: servers that the run starts.
            num_groups: groups of a push: pipeline stages of the trainer.
        """
        self._run = run
        self._program_log = program_log
        self._num_servers = num_servers
        self._num_groups = num_groups
        self._killed_at = 0.0
        # the metrics file's size, and its content at that time
        self._size, self._read = 0, list[dict]()
        self._num_steps = 0  # at the last kill
        self._num_joined = 0  # joins of a group by the last server, at its kill
        self.killed: list[StartedServer] = []
        self.in_push: StartedServer | None = None  # the victim of a kill in a push
        # of that one and of the next: seconds until a push reached all
        self.away_s: list[float] = []

    def are_over(self) -> bool:
        """Kill, if it is time for it; return whether one server died in a push, another between
        two, and all are back."""
        if self.in_push is None:
            self._kill_in_push()
            return False
        if not self._are_back():
            return False
        self.away_s.append(time.monotonic() - self._killed_at)
        if len(self.away_s) == 1:
            self._kill(self._server(0) or self._lacking())
            return False
        return True

    def missed(self) -> str:
        """Return a clause about kills that all missed a push, or ""."""
        if self.in_push or not self.killed:
            return ""
        return f"; {self.killed[-1].name} was killed {len(self.killed)} times in a push, and no push left it out"

    def _kill_in_push(self) -> None:
        """Kill the last server after its join of the groups, again for each of its lives, until a
        push has left it out."""
        server = self._server(self._num_servers - 1)
        if server is None:
            return
        num_joined = self._joins(server)
        if self.killed and was_left_out(self._run.log("trainer-rank-0"), server.url):
            self.in_push = self.killed[-1]
        elif server in self.killed:  # not started again yet
            self._num_joined = num_joined
        elif num_joined - self._num_joined >= self._num_groups:
            self._kill(server)

    def _are_back(self) -> bool:
        """Return whether a push was made without the server that was killed, and the newest one
        reached all."""
        reached = [line.get("weight_sync/num_servers", 0) for line in self._lines()[self._num_steps :]]
        return len(reached) > 1 and min(reached) < self._num_servers == reached[-1]

    def _lines(self) -> list[dict]:
        """Return the run's metrics, read again only after a growth of the file. Reading hundreds of
        times a second would take a good part of a core."""
        size = self._run.metrics.stat().st_size if self._run.metrics.exists() else 0
        if size != self._size:
            self._size, self._read = size, read_metrics(self._run.metrics)
        return self._read

    def _server(self, number: int) -> StartedServer | None:
        """Return a server's last start, or None."""
        name = f"server-{number}"
        text = self._program_log.read_text(errors="replace") if self._program_log.exists() else ""
        starts = re.findall(rf"{name} starts at (\S+) \(pid (\d+)", text)
        return StartedServer(name, starts[-1][0], int(starts[-1][1])) if starts else None

    def _joins(self, server: StartedServer) -> int:
        """Return how often a server joined a group, over all its lives."""
        log = self._run.log(server.name)
        return log.read_text(errors="replace").count(_JOINED_A_GROUP) if log.exists() else 0

    def _kill(self, server: StartedServer) -> None:
        kill_family(server.pid)
        self._killed_at = time.monotonic()
        self._num_steps = len(self._lines())
        self.killed.append(server)

    def _lacking(self) -> StartedServer:
        raise Red(f"{self._program_log} does not say that server-0 was started")

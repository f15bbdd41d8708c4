"""SIGKILL to servers of a run: to one while weights are pushed to it, then to another between two pushes."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from launch.acceptance.rung import Red, kill_family
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.report import read_metrics

_JOINED_A_GROUP = "init custom process group"
"""What SGLang logs when it joins a group of a push, just before the first broadcast in it."""


@dataclass(frozen=True)
class StartedServer:
    """A server as its supervisor tells of it. name: that of its log file, too."""

    name: str
    url: str
    pid: int


class ServerKills:
    """Kills that are due when the run's files say so. To be asked all the time, by `are_over`.

    The last server dies in the first push that reaches it, when it has joined the groups and waits for the first
    broadcast. When it has come back, the first server dies, after a step's push.
    """

    def __init__(self, run: RunFolder, program_log: Path, num_servers: int, num_groups: int) -> None:
        """Prepare the kills.

        Args:
            run: its folder.
            program_log: where the servers' supervisor logs.
            num_servers: servers that the run starts.
            num_groups: groups of a push: pipeline stages of the trainer.
        """
        self._run = run
        self._program_log = program_log
        self._num_servers = num_servers
        self._num_groups = num_groups
        self._killed_at = 0.0
        self._num_steps = 0  # that were done when the last kill came
        self.killed: list[StartedServer] = []
        self.away_s: list[float] = []  # of each server that came back: seconds until a push reached all

    def are_over(self) -> bool:
        """Kill, if it is time for it; return whether both servers were killed and all are back."""
        if not self.killed:
            victim = self._server(self._num_servers - 1)
            if victim and self._num_joined(victim) >= self._num_groups:
                self._kill(victim)
            return False
        lines = read_metrics(self._run.metrics) if self._run.metrics.exists() else []
        if not self._are_back(lines):
            return False
        self.away_s.append(time.monotonic() - self._killed_at)
        self._num_steps = len(lines)
        if len(self.killed) == 1:
            self._kill(self._server(0) or self._lacking())
            return False
        return True

    def _are_back(self, lines: list[dict]) -> bool:
        """Return whether a push was made without the server that was killed, and the newest one reached all."""
        reached = [line.get("weight_sync/num_servers", 0) for line in lines[self._num_steps :]]
        return len(reached) > 1 and min(reached) < self._num_servers == reached[-1]

    def _server(self, number: int) -> StartedServer | None:
        """Return a server as it was started last, None where it has not been started."""
        name = f"server-{number}"
        text = self._program_log.read_text(errors="replace") if self._program_log.exists() else ""
        starts = re.findall(rf"{name} starts at (\S+) \(pid (\d+)", text)
        return StartedServer(name, starts[-1][0], int(starts[-1][1])) if starts else None

    def _num_joined(self, server: StartedServer) -> int:
        log = self._run.log(server.name)
        return log.read_text(errors="replace").count(_JOINED_A_GROUP) if log.exists() else 0

    def _kill(self, server: StartedServer) -> None:
        kill_family(server.pid)
        self._killed_at = time.monotonic()
        self.killed.append(server)

    def _lacking(self) -> StartedServer:
        raise Red(f"{self._program_log} does not say that server-0 was started")

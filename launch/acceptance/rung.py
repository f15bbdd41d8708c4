"""One rung: its programs, one after the other as child processes under one deadline, and its
result."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.acceptance.sizes import Sizes
from launch.preflight.machine import REPOSITORY
from megatron_dapo.common.exit_codes import exit_phrase
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.servers.child_process import ChildProcess
from megatron_dapo.storage.run_folder import RunFolder

_POLL_S = 0.1
_WATCH_S = 0.005  # for a program to be killed in the middle of something
_GRACE_S = 20.0  # for a program past its deadline

Number = float | int | str


class Red(Exception):
    """The rung has failed. The text is the error, in one line."""


@dataclass(frozen=True)
class RungVerdict:
    """The result of a green rung. text: one line; numbers: measurements by name, for the report."""

    text: str
    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """One step of the ladder."""

    name: str
    question: str
    """For people."""
    limit_s: float
    """Of all its programs together."""
    climb: "Callable[[Attempt], RungVerdict]"
    """Runs them and judges, or raises Red."""
    needs: Callable[["Inputs"], str | None] = lambda inputs: None
    """Why the machine or the command cannot have this rung, or None."""


@dataclass(frozen=True)
class Inputs:
    """The options of a climb."""

    sizes: Sizes
    folder: Path
    """Of the report, the logs and the runs."""
    recipe: tuple[str, ...] = ()
    """Config file and overrides of the run to measure; empty: the demo's."""
    min_bandwidth: float | None = None
    """Floor of the all-reduce in GB/s; None: `MIN_GPU_BANDWIDTH` on GPUs, else the preflight's
    own."""

    def run(self, name: str) -> RunFolder:
        """Return the folder of a rung's training run."""
        return RunFolder(self.folder / "runs" / name)


class Attempt:
    """A rung in progress. Its programs share one log file. stop: a signal ends it."""

    def __init__(self, rung: Rung, inputs: Inputs, stop: StopSignals | None = None) -> None:
        self._stop = stop
        self.inputs = inputs
        self.commands: list[str] = []  # as a shell takes them
        self.log = inputs.folder / "logs" / f"{rung.name}.log"
        self._rung = rung
        self._deadline = time.monotonic() + rung.limit_s

    def module(
        self, name: str, *arguments: str, meanwhile: Callable[[], None] = lambda: None, setting: str = "", code: int = 0
    ) -> None:
        """Run `python -m NAME ARGUMENTS` to its end, and call `meanwhile` all the time. Raises Red for
        another exit code, or at the deadline. setting: VARIABLE=value, added to its environment."""
        child = self._start(name, arguments, setting)
        try:
            while (ended := child.poll()) is None:
                self._check(name)
                for _ in range(round(_POLL_S / _WATCH_S)):
                    meanwhile()
                    time.sleep(_WATCH_S)
        finally:
            child.stop(_GRACE_S)
        if ended != code:
            raise Red(f"{name} {exit_phrase(ended)}{f', not {code}, with {setting}' if setting else ''}")

    def module_killed(self, name: str, *arguments: str, when: Callable[[], bool]) -> None:
        """Run it until `when()`, then kill it and its descendants with SIGKILL. Raises Red if it
        ends before."""
        child = self._start(name, arguments, "")
        # at the child; each time it reads the list of all processes, and `when` has to be in time
        looks_again_at = 0.0
        try:
            while not when():
                if time.monotonic() >= looks_again_at:
                    if (code := child.poll()) is not None:
                        raise Red(f"{name} {exit_phrase(code)} before it could be killed")
                    self._check(name)
                    looks_again_at = time.monotonic() + _POLL_S
                time.sleep(_WATCH_S)
            kill_family(child.pid)
        finally:
            child.stop(_GRACE_S)

    def note(self, text: str) -> None:
        """Write lines of the ladder's own to the rung's log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text)

    def _start(self, name: str, arguments: Sequence[str], setting: str) -> ChildProcess:
        command = [sys.executable, "-m", name, *arguments]
        self.commands.append(shlex.join([*filter(None, [setting]), "python", *command[1:]]))
        self.note(f"$ {self.commands[-1]}\n")
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | dict([setting.split("=", 1)] if setting else [])
        return ChildProcess(name, command, self.log, os.environ | more)

    def _check(self, name: str) -> None:
        if self._stop and self._stop.received:
            raise Red(f"{name} was ended, since the ladder was asked to stop by {self._stop.received.name}")
        if time.monotonic() > self._deadline:
            raise Red(f"{name} had not ended after the rung's {self._rung.limit_s:g} s")


def kill_family(pid: int) -> None:
    """Kill a process and its descendants. It is stopped first, so that none of them starts another
    or notices its death."""
    leader = psutil.Process(pid)
    leader.send_signal(signal.SIGSTOP)
    for process in (*leader.children(recursive=True), leader):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue

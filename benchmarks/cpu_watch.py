"""The CPU time of a command and of all processes below it, while it goes from step to step."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Reading:
    """The use at the first sight of a number of finished steps."""

    num_steps: int
    seconds: float
    cpu_s: dict[str, float]  # user and system, by the processes' part


@dataclass
class ProcessTree:
    """Processes below one, with the last seen use of the ended ones.

    part_of: names a process's part of a program, by its command line and the part of its parent.
    """

    root: psutil.Process
    part_of: Callable[[Sequence[str], str | None], str]
    _parts: dict[psutil.Process, str] = field(default_factory=dict)
    _cpu_s: dict[psutil.Process, float] = field(default_factory=dict)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each part until now."""
        with suppress(psutil.NoSuchProcess):
            # parents before their children
            for process in (self.root, *self.root.children(recursive=True)):
                self._look_at(process)
        for process in self._parts:  # after the end of their parent they are nobody's children
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
        used: Counter[str] = Counter()
        for process, seconds in self._cpu_s.items():
            used[self._parts[process]] += seconds
        return dict(used)

    def _look_at(self, process: psutil.Process) -> None:
        """Name the part of a process, anew each time.

        Between fork and exec it has its parent's command line.
        """
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            self._parts[process] = self.part_of(process.cmdline(), self._parts.get(process.parent()))


def watched(
    command: Sequence[str],
    environment: Mapping[str, str],
    num_steps: Callable[[], int],
    part_of: Callable[[Sequence[str], str | None], str],
) -> list[Reading]:
    """Run a command; return a reading for each number of steps, and one from after its end.

    Its output goes to standard error. Raises CalledProcessError if it fails.
    """
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    tree = ProcessTree(psutil.Process(process.pid), part_of)
    readings: list[Reading] = []
    try:
        while process.poll() is None:
            done, used = num_steps(), tree.cpu_s()
            if not readings or done > readings[-1].num_steps:
                readings.append(Reading(done, time.monotonic() - start, used))
            time.sleep(POLL_INTERVAL_S)
    finally:
        process.terminate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [*readings, Reading(num_steps(), time.monotonic() - start, tree.cpu_s())]


def between(readings: Sequence[Reading], first: int, last: int) -> Reading:
    """Return the use from the end of step `first` to the end of step `last`."""
    begin, end = (
        min((reading for reading in readings if reading.num_steps >= number), key=lambda reading: reading.seconds)
        for number in (first, last)
    )
    used = {part: seconds - begin.cpu_s.get(part, 0.0) for part, seconds in end.cpu_s.items()}
    return Reading(end.num_steps - begin.num_steps, end.seconds - begin.seconds, used)

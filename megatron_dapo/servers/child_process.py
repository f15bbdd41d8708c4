"""A long-running program started by us, with its own session and log file.

Its end leaves no descendants.
"""

import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from megatron_dapo.common.exit_codes import exit_phrase
from megatron_dapo.common.log_lines import read_lines
from megatron_dapo.common.parent_death import end_with_parent

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 15
TAIL_PREFIX = "  | "
_DEATH_S = 5.0
"""Time for a killed process to die: it needs a core for a moment, and the kernel must free it."""


class ChildProcess:
    """A started program and everything started by it.

    It runs in a session of its own, so that Ctrl-C in a terminal reaches us and not it: we end it
    in order. If we are killed, the kernel kills it as soon as the thread that made it is gone. Its
    descendants have to see to that themselves, as SGLang's do.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        show_stdout: bool = False,
    ) -> None:
        """Start the command.

        Args:
            name: its name in messages.
            command: the program and its arguments.
            log_file: its output is appended there.
            environment: all of its variables; by default ours.
            show_stdout: standard output goes to ours (a terminal stays one), only standard error to
                the log.
        """
        self.name = name
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as output:
            self._log_start = output.tell()  # above it are the words of earlier tries
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=None if show_stdout else output,
                stderr=output,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        self._family = {psutil.Process(self._process.pid)}
        self._was_asked = False

    @property
    def pid(self) -> int:
        """Return the id of the program's process."""
        return self._process.pid

    def pids(self) -> list[int]:
        """Return its own process and its descendants, as far as `poll` has learnt of them."""
        return [process.pid for process in self._family]

    def poll(self) -> int | None:
        """Return the exit code, None while it runs.

        To be called every second or so: it also learns of new descendants. There is no other way to
        find a descendant after its parent's death.
        """
        self._learn_family()
        return self._process.poll()

    def is_gone(self) -> bool:
        """Return whether it and all its known descendants are dead."""
        return self._process.poll() is not None and not any(map(_is_alive, self._family))

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, None if it still runs after timeout_s."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the program, once, to end itself and its children (SIGTERM)."""
        if self.poll() is None and not self._was_asked:
            self._was_asked = True
            self._process.terminate()

    def stop(self, grace_s: float) -> int:
        """Send SIGTERM, and after grace_s SIGKILL to the rest of it and its descendants.

        Return the exit code once they are dead, or `_DEATH_S` later: their ports and GPU memory are
        free then for the next program.
        """
        self.terminate()
        if self.wait(grace_s) is None:
            log.warning("%s (pid %d) did not end within %.0f s of SIGTERM; it is killed", self.name, self.pid, grace_s)
        self.kill()
        code = self._process.wait()
        deadline = time.monotonic() + _DEATH_S
        while any(map(_is_alive, self._family)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if alive := [process.pid for process in self._family if _is_alive(process)]:
            log.warning("%s: pids %s live %.0f s after SIGKILL", self.name, alive, _DEATH_S)
        return code

    def kill(self) -> None:
        """Send SIGKILL to it and its descendants; do not wait for their death."""
        self._learn_family()
        for process in self._family:
            try:
                process.kill()  # psutil compares creation times: a pid used again is not hit
            except psutil.NoSuchProcess:
                continue

    def describe_end(self) -> str:
        """Return its end, the place of its log, and the log's last lines."""
        return f"{self.name} {exit_phrase(self._process.returncode)}; its log is {self.log_file}\n{self.log_tail()}"

    def log_tail(self) -> str:
        """Return the last lines of its log, each after TAIL_PREFIX."""
        lines = read_lines(self.log_file, self._log_start)
        return "\n".join(f"{TAIL_PREFIX}{line[:400]}" for line in lines[-LOG_TAIL_LINES:])

    def _learn_family(self) -> None:
        """Drop the dead, add the children of the living."""
        self._family = {process for process in self._family if process.is_running()}
        others = {process for process in psutil.process_iter(["ppid"])} - self._family
        while True:
            pids = {process.pid for process in self._family}
            children = {process for process in others if process.info["ppid"] in pids}
            if not children:
                return
            self._family |= children
            others -= children


def _is_alive(process: psutil.Process) -> bool:
    """Return False for a zombie: it only waits for its parent to take note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

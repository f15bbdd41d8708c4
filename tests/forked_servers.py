"""Stands for subprocess.Popen in tests with SGLang servers:
forks of a process with SGLang imported.

That import is nearly all the work of a server's start. A fork does the command's work: it has the
command's arguments, environment and log, and a session of its own. The list of processes shows the
nursery's command line and environment for it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import IO, Any
from unittest import mock

from megatron_dapo.servers import child_process
from tests.helpers import REPOSITORY

COMMAND = [sys.executable, "-m", "megatron_dapo.servers.keyed_sglang"]
OF_ONE_SERVER = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST")
"""Variables that differ. All others have to be as at the import of SGLang,
since its modules read them."""

START = subprocess.Popen


@contextmanager
def forked_servers() -> Iterator[None]:
    """Have the servers that this process starts be forks."""
    with mock.patch.object(child_process.subprocess, "Popen", popen):
        yield


def popen(command: Sequence[str], **options: Any) -> Any:
    """Start a fork for a server's command, else a process."""
    return (ForkedServer if list(command[:3]) == COMMAND else START)(command, **options)


class ForkedServer:
    """`subprocess.Popen(COMMAND + ARGUMENTS, ...)` as a fork, with the options of ChildProcess.

    preexec_fn, which has the kernel end a child with its parent, is left out. The parent of a fork
    is the nursery: it sees to that, and ends with this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO,
        stderr: IO,
        env: Mapping[str, str],
        start_new_session: bool,
        preexec_fn: Any,
    ) -> None:
        assert (stdin, stdout, start_new_session) == (subprocess.DEVNULL, stderr, True)
        self.returncode: int | None = None
        self._nursery = nursery(tuple(sorted((k, v) for k, v in env.items() if k not in OF_ONE_SERVER)))
        self.pid = self._nursery.ask("start", command[3:], dict(env), os.path.abspath(stdout.name))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)  # until it was waited for, the number is its own


class ServerNursery:
    """A process that forks servers (tests/server_nursery.py). It ends with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.server_nursery"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = START(command, cwd=REPOSITORY, env=environment, start_new_session=True, **pipes)
        self._lock = threading.Lock()

    def ask(self, *command: Any) -> Any:
        """Return the answer to a command."""
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@cache
def nursery(variables: tuple[tuple[str, str], ...]) -> ServerNursery:
    """Return the nursery with these variables."""
    return ServerNursery(dict(variables))

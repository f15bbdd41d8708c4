"""Stands for subprocess.Popen in tests with SGLang servers:
forks of a process with SGLang imported.

That import is nearly all the work of a server's start. A fork does the command's work: it has the
command's arguments, environment and log, and a session of its own. The list of processes shows the
nursery's command line and environment for it.
"""

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any
from unittest import mock

from megatron_dapo.platform import cpu_ledger
from megatron_dapo.servers import child_process, server_command
from tests.helpers import REPOSITORY

COMMAND = [sys.executable, "-m", "megatron_dapo.servers.keyed_sglang"]
NURSERIES = "TESTS_NURSERIES"
"""Variable of the folder with the sockets of nurseries, and of the process that they end with. The
first process with this module owns them; programs started by it, forks too, share them."""

OF_ONE_SERVER = (
    *("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", NURSERIES),
    *server_command.FLOAT32_STATES,
    *("SGLANG_CPU_OMP_THREADS_BIND", cpu_ledger.FOLDER, cpu_ledger.GPUS, cpu_ledger.BYTES),
)
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
    """A connection to a process that forks servers (tests/server_nursery.py). They end with this
    process."""

    def __init__(self, path: Path) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        self._lines = connection.makefile("rw")
        self._lock = threading.Lock()

    def ask(self, *command: Any) -> Any:
        """Return the answer to a command."""
        with self._lock:
            self._lines.write(json.dumps(command) + "\n")
            self._lines.flush()
            return json.loads(self._lines.readline())


@cache
def nursery(variables: tuple[tuple[str, str], ...]) -> ServerNursery:
    """Return the nursery with these variables; it is started if there is none."""
    own_nurseries()
    folder, owner = os.environ[NURSERIES].split(":")
    path = Path(folder) / hashlib.sha256(json.dumps(variables).encode()).hexdigest()[:16]
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start_nursery(path, owner, dict(variables))
    return ServerNursery(path)


def _start_nursery(path: Path, owner: str, environment: Mapping[str, str]) -> None:
    """Start it, and wait until it takes connections. Raise AssertionError with its log if it does not."""
    command = [sys.executable, "-m", "tests.server_nursery", str(path), owner]
    with path.with_suffix(".log").open("w") as log:  # nobody's output waits for its end
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        START(command, cwd=REPOSITORY, env=environment, start_new_session=True, **pipes).wait()
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, path.with_suffix(".log").read_text()
        time.sleep(0.02)


def own_nurseries() -> None:
    """Have this process own the nurseries if nobody does."""
    if NURSERIES not in os.environ:
        folder = tempfile.mkdtemp(prefix="nurseries-")
        os.environ[NURSERIES] = f"{folder}:{os.getpid()}"
        atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork of it may end earlier
        shutil.rmtree(folder, ignore_errors=True)

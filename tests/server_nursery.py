"""Starts SGLang servers by forking: one import for all, and a new server after a second.

python -m tests.server_nursery SOCKET OWNER

Run it with the environment of a server. It listens at SOCKET until the process OWNER ends, and ends
all servers then. Commands are lines, as JSON, and so are its answers. ["start", ARGUMENTS,
ENVIRONMENT, LOG] is answered with the server's process id, ["poll", PID] with its exit code, null
while it runs. The end of a connection ends the servers started by it.
"""

import json
import os
import select
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import IO

import setproctitle

from megatron_dapo.common.large_imports import large_imports
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.servers import keyed_sglang


def import_sglang() -> None:
    """Import the modules of keyed_sglang.main. No thread may start: forks have one thread only."""
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", keyed_sglang.SERVED_MODELS)
    with large_imports():
        import sglang.launch_server
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import sglang.srt.entrypoints.http_server  # noqa: F401
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"an import started {num_threads - 1} threads; forks of this process would be without them")


def serve(arguments: list[str], environment: dict[str, str], log: str) -> int:
    """Be a server; return its exit code."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # an import may have asked for it
    sys.argv = [keyed_sglang.__file__, *arguments]
    return keyed_sglang.main()


def exit_code(server: int) -> int | None:
    """Return a finished server's exit code, as subprocess.Popen gives it."""
    ended, status = os.waitpid(server, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


class Starter:
    """A connection: starts servers, and ends them when it ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: IO[str] = connection.makefile("rw")
        self._servers: set[int] = set()

    def fileno(self) -> int:
        return self._connection.fileno()

    def answer(self) -> bool:
        """Answer one command; False at the end of the connection."""
        line = self._lines.readline()
        if not line:
            self._end_servers()
            return False
        command, *values = json.loads(line)
        if command == "start":
            answer: int | None = self._start(*values)
        else:
            answer = exit_code(*values)
            if answer is not None:
                self._servers.discard(*values)
        self._lines.write(json.dumps(answer) + "\n")
        self._lines.flush()
        return True

    def _start(self, arguments: list[str], environment: dict[str, str], log: str) -> int:
        nursery = os.getpid()
        server = os.fork()
        if not server:
            end_with_parent(nursery)
            sys.exit(serve(arguments, environment, log))
        self._servers.add(server)
        return server

    def _end_servers(self) -> None:
        for server in self._servers:
            os.kill(server, signal.SIGKILL)  # until it was waited for, the number is its own
            os.waitpid(server, 0)


def listen(path: str) -> socket.socket:
    """Listen at a path, which is there once a connection can be made."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def main() -> int:
    path, owner = sys.argv[1], int(sys.argv[2])
    if os.fork():  # it is no descendant of a launcher, whose end others may wait for or bring about
        os._exit(0)
    import_sglang()
    # it finds the place of titles by the variables at the start of the process
    setproctitle.getproctitle()
    with suppress(ProcessLookupError):  # it is gone already
        end = os.pidfd_open(owner)
        listener = listen(path)
        starters: list[Starter] = []
        while end not in (ready := select.select([end, listener, *starters], [], [])[0]):
            if listener in ready:
                starters.append(Starter(listener.accept()[0]))
            starters = [each for each in starters if each not in ready or each.answer()]
    os._exit(0)  # to take thousands of modules apart would take a second


if __name__ == "__main__":
    sys.exit(main())

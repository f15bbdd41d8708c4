"""Stands for subprocess.Popen in tests with many trainers:
forks of a process with all imports done.

A start of the trainer takes seconds, nearly all of them for imports. A fork does the command's
work: it has the command's arguments, environment, standard output and log, and a session of its
own.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import IO, Any

from tests import forked_servers
from tests.forked_ranks import fork_server
from tests.helpers import REPOSITORY

forked_servers.own_nurseries()  # forks with servers share this process's


class ForkedPopen:
    """`subprocess.Popen([python, "-m", MODULE, *ARGUMENTS], ...)` as a fork,
    with the options of ChildProcess.

    preexec_fn, which has the kernel end a child with its parent, is left out: the parent of a fork
    is the fork server.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO | None,
        stderr: IO,
        env: Mapping[str, str],
        start_new_session: bool,
        preexec_fn: Any,
    ) -> None:
        python, option, *words = command
        assert (python, option, stdin, start_new_session) == (sys.executable, "-m", subprocess.DEVNULL, True)
        outputs = _Descriptors(1 if stdout is None else stdout.fileno(), stderr.fileno())
        self._process = fork_server().Process(target=_run, args=(words, dict(env), outputs))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()


class _Descriptors:
    """Open files that a fork gets duplicates of."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple:
        return _received, tuple(DupFd(number) for number in self.numbers)


def _received(*duplicates: Any) -> list[int]:
    return [duplicate.detach() for duplicate in duplicates]


def _run(words: list[str], environment: dict[str, str], descriptors: list[int]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    for number, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    module, *arguments = words
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

"""A function in a process with bounds on memory and time: a hang or a leak ends there."""

import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass

MEMORY = 1 << 30  # bytes beyond those at the process's start
CPU_S = 60  # the page of a small run takes one
ASLEEP_S = 120  # waiting for a pipe, it takes no CPU time at all


@dataclass(frozen=True)
class Ended:
    """code: the function's result; negative: the signal that ended the process.
    error: its standard error."""

    code: int
    error: str


def run_bounded(function: Callable[[], int], memory: int = MEMORY) -> Ended:
    """Call a function in a fork of this process, and return how it ended: 1 after an exception,
    with the traceback."""
    with tempfile.TemporaryFile("w+", errors="replace") as error:
        child = os.fork()
        if child == 0:
            _call(function, memory, error.fileno())
        _, status = os.waitpid(child, 0)
        error.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), error.read())


def _call(function: Callable[[], int], memory: int, error: int) -> None:
    code = 1
    try:
        os.dup2(error, 2)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ASLEEP_S)
        code = function()
    except BaseException:
        os.write(error, traceback.format_exc().encode())
    finally:
        os._exit(code)

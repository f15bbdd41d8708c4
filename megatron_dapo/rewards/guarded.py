"""A worker process under a guard: when the worker ends, or is to end, all its descendants end with
it.

`run_guarded` forks. The parent, the guard, runs only this code. As the "subreaper" of its
descendants it inherits orphans, even in other sessions, so that none escapes.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, shell_exit_code
from megatron_dapo.common.signals import SignalReceiver, reset_signals

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0  # for a process that survives SIGKILL for a while: in a call to hanging storage
_LOOK_S = 0.01
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def run_guarded(work: Callable[[], None], pipe: int, grace_s: float = 0.0) -> None:
    """Do the work in a child process; return there.

    This process ends when the child has ended, the other side of `pipe` is closed or SIGTERM came,
    whichever is first, after all descendants. Single-threaded callers only.

    grace_s: a SIGTERM is passed on to the child's group, which has so long to end by itself.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    awake, wake = os.pipe()  # numbers of the signals that came
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    SignalReceiver(_SIGNALS).install()  # so that signal numbers are written to `wake`
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        reset_signals(_SIGNALS)
        os.close(awake)
        os.close(wake)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it ended before this was set
            os._exit(1)
        os.setpgid(0, 0)  # so that signals to the worker's own group do not reach the guard
        work()
        return
    code = _wait(worker, pipe, awake, grace_s)
    os._exit(_end_all(worker, code))


def _wait(worker: int, pipe: int, awake: int, grace_s: float) -> int | None:
    """Return the worker's exit code, or None to end it. Descendants that end meanwhile leave no
    zombies."""
    watch = select.poll()
    watch.register(awake, select.POLLIN)
    watch.register(pipe, 0)  # hang-up is always reported; the data are the worker's
    deadline = None
    while True:
        left_s = None if deadline is None else deadline - time.monotonic()
        ready = [file for file, _ in watch.poll(None if left_s is None else max(0.0, left_s) * 1000)]
        numbers = os.read(awake, 4096) if awake in ready else b""
        if (code := _reap(worker)) is not None or pipe in ready or (left_s is not None and left_s <= 0):
            return code
        if signal.SIGTERM in numbers and deadline is None:
            if not grace_s:
                return None
            deadline = time.monotonic() + grace_s
            with suppress(ProcessLookupError):  # its group is not made yet
                os.killpg(worker, signal.SIGTERM)


def _end_all(worker: int, code: int | None) -> int:
    """Kill all descendants, and again their orphans, until none is left; return the worker's exit
    code."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and (children := psutil.Process().children()):
        for child in children:
            os.kill(child.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        time.sleep(_LOOK_S)
        ended = _reap(worker)
        code = code if ended is None else ended
    return FAILED_EXIT_CODE if code is None else shell_exit_code(code)


def _reap(worker: int) -> int | None:
    """Reap ended children; return the worker's exit code if it is among them."""
    code = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:  # there are no more
        pass
    return code


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

"""Ends processes that must not outlive their parent."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # not loaded after a fork: another thread may have held the loader's lock


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this child when the thread that started it ends (Linux). parent: the
    starter's pid; if it is gone already, the child ends at once."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent(interval_s: float = 1.0) -> None:
    """Start a thread that kills this process within about interval_s seconds after its parent ends.

    This is for a parent that may have started us in a thread that ends before the parent does, such
    as an MPI launcher: there `end_with_parent` would act too early.
    """
    threading.Thread(target=_end_after, args=(os.getppid(), interval_s), name="parent-watch", daemon=True).start()


def _end_after(parent: int, interval_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(interval_s)
    os.kill(os.getpid(), signal.SIGKILL)

"""Standard input, output and error: there, whatever a process was started with, and no trouble when nobody reads any
more what it says: a terminal that was closed, a `tee` that ended, `| head`."""

import os
import sys

_STANDARD_ERROR = 2


def open_standard_streams() -> None:
    """Those that whoever started us has closed, as one does who makes a daemon, lead nowhere. Else the next files that
    are opened, or sockets, take their numbers, and the processes that we start have none. To be called first."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


def say(text: str) -> None:
    """Print at once. Where nobody can read it any more, it and all that follows is dropped: no run ends of that."""
    try:
        print(text, flush=True)
    except OSError:
        fall_silent()


def fall_silent() -> None:
    """What is written to standard output from now on goes nowhere and raises nothing: its buffer at the end neither."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""Standard input, output and error: there, whatever a process was started with, and no trouble when
nobody reads any more what it says: a terminal that was closed, a `tee` that ended, `| head`."""

import os
import sys

_STANDARD_ERROR = 2


def open_standard_streams() -> None:
    """Open the streams that our starter has closed, as one does who makes a daemon; they lead
    nowhere.

    To be called first: else the next files or sockets that are opened take their numbers, and the
    processes that we start have none."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


def print_line(text: str) -> None:
    """Print at once. Where nobody can read it any more, it and all that follows is dropped: no run
    ends of that. Bytes of a file's name that are no text are shown as question marks."""
    try:
        print(text.encode("utf-8", "replace").decode("utf-8"), flush=True)
    except OSError:
        mute()


def mute() -> None:
    """Drop what is written to standard output from now on. Its buffer raises nothing at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

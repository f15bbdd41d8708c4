"""Standard input, output and error: opened if the parent closed them, and silent after their reader
is gone (a closed terminal, an ended `tee`, `| head`)."""

import os
import sys

_STANDARD_ERROR = 2


def open_standard_streams() -> None:
    """Open standard streams that the parent closed, as daemon starters do; they lead nowhere.

    Call this first: otherwise the next files or sockets take their numbers, and child processes
    have none.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


def print_line(text: str) -> None:
    """Print at once. After the reader is gone, this and all later output is dropped, and the run
    continues. Bytes of a file's name that are no text become question marks."""
    try:
        print(text.encode("utf-8", "replace").decode("utf-8"), flush=True)
    except OSError:
        mute()


def mute() -> None:
    """Drop standard output from now on. Its buffer raises nothing at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""Standard output of a run that outlives whoever reads it: a terminal that was closed, a `tee` that ended."""

import os
import sys


def say(text: str) -> None:
    """Print at once. Where nobody can read it any more, it and all that follows is dropped: no run ends of that."""
    try:
        print(text, flush=True)
    except OSError:
        fall_silent()


def fall_silent() -> None:
    """What is written to standard output from now on goes nowhere and raises nothing, at the end of the process too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""Shared by the commands of this folder: exit codes, one-sentence errors, signals, options, a
progress bar, the first process."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE, signal_exit_code
from megatron_dapo.common.signals import SignalReceiver

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# possible launchers of this process, by the variable of its rank
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank() -> int:
    """Return this process's number among those of torchrun, srun or mpirun; 0 for a single
    process."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def exit_code(work: Callable[[], int | None]) -> int:
    """Return the work's exit code (None: 0); 2 for a mistake of the user, reported on standard
    error."""
    try:
        return work() or 0
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE


@contextmanager
def signals_as_exit() -> Iterator[list[signal.Signals]]:
    """End the block like `sys.exit` on Ctrl-C, SIGTERM or SIGHUP, with the shell's code for the
    signal.

    So unfinished files are removed. A signal ignored before (nohup) stays ignored. Yield the list
    of received signals.
    """

    def end(number: signal.Signals) -> None:
        if len(receiver.received) > 1:  # a second one would break off the removing
            return
        if rank() == 0:
            with suppress(OSError):  # a closed terminal
                os.write(2, f"Ended by {number.name}.\n".encode())
        raise SystemExit(signal_exit_code(number))

    receiver = SignalReceiver(_END_SIGNALS, end, keep_ignored=_END_SIGNALS)
    with receiver:
        try:
            yield receiver.received
        except Exception as error:  # libraries wrap the exit in their own errors
            if receiver.received:
                raise SystemExit(signal_exit_code(receiver.received[0])) from error
            raise


def at_least(smallest: int) -> Callable[[str], int]:
    """Return a function for `type=` of an option that takes a whole number of at least
    `smallest`."""

    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {smallest}")
        return number

    return whole


def no_space(path: object, error: OSError) -> UserError:
    """Return the sentence for an unwritable output: a full or read-only disk, a folder of another
    user."""
    return UserError(f"{path} cannot be written ({error.strerror or error}); choose another output.")


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error, in the first process at a terminal.

    Yield a function, to be called with the number of units done since its last call.
    """
    if rank() != 0 or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f}"))
    clocks = (TextColumn(unit), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, *clocks, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)

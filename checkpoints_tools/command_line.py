"""What the commands of this folder share: exit codes, one-sentence errors, a progress bar, which process speaks."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_dapo.config import UserError

USER_ERROR_EXIT_CODE = 2
# the launchers that may have started this process, by the variable that holds its rank
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank() -> int:
    """This process's number among those that torchrun, srun or mpirun started; 0 where it was started alone."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def exit_code(work: Callable[[], int | None]) -> int:
    """What the work returns (None = 0); 2 for a mistake of the user, whose sentences go to standard error."""
    try:
        return work() or 0
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE


def no_space(path: object, error: OSError) -> UserError:
    """The sentence for an output that cannot be written: a full or read-only disk, a folder that is not ours."""
    return UserError(f"{path} cannot be written ({error.strerror or error}); choose another output.")


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal and this is the first process; call what it gives with the number
    of units done since."""
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

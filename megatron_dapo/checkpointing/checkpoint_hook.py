"""A function of the user's own for each finished checkpoint (`trainer.checkpoint_hook`)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction


def load_hook(path: str | None, report: Callable[[Sequence[str]], None]) -> Callable[[Path], None]:
    """Return the function with its failures reported: a checkpoint is no worse for them.

    path: its import path; None: nothing happens. Raises UserError with one sentence.
    """
    hook = OwnFunction.load("trainer.checkpoint_hook", path) if path else None

    def call(folder: Path) -> None:
        if hook is not None:
            try:
                hook(lambda answer: None, "without an error", str(folder), folder)
            except UserError as error:
                report([f"{error} Training goes on."])

    return call

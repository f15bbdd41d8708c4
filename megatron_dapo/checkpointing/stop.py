"""A request to stop: SIGTERM or SIGUSR1 to a rank, or a file in the run folder. All ranks obey at one step's end."""

import logging
import signal
import threading
from pathlib import Path
from types import FrameType

from megatron_dapo.checkpointing.ranks import Ranks

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While entered, the signals do not end the process: they are remembered. A second SIGTERM ends it at once.

    file: looked for by rank 0 alone. Outside the main thread signals are left as they are.
    """

    def __init__(self, file: Path, ranks: Ranks) -> None:
        self._file, self._ranks = file, ranks
        self._received: str | None = None
        self._previous: dict = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> str | None:
        """What the first rank that was asked to stop was asked by, the same on all ranks; None = go on. Collective."""
        mine = self._received
        if mine is None and self._ranks.rank == 0 and self._file.exists():
            mine = f"the file {self._file}"
        return next(filter(None, self._ranks.gather(mine)), None)

    def obeyed(self) -> None:
        """Remove the file, so that the run can be started again."""
        if self._ranks.rank == 0:
            self._file.unlink(missing_ok=True)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._received = signal.Signals(number).name

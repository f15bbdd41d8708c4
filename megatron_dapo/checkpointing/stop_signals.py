"""Signals that ask to stop, kept until a loop asks for them: nothing is interrupted."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType


class StopSignals:
    """While entered, remembers the first of the signals, and how many came. Outside the main thread it changes nothing:
    signals go there."""

    def __init__(self, numbers: Sequence[signal.Signals], ends_at_once: signal.Signals | None = None) -> None:
        """ends_at_once: ends the process, as it would without this, where it is not the first signal."""
        self.received: signal.Signals | None = None
        self.num_received = 0
        self._numbers, self._ends_at_once = numbers, ends_at_once
        self._previous: dict = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it."""
        assert self.received is not None
        return 128 + self.received

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.received is not None and number == self._ends_at_once:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = self.received or signal.Signals(number)
        self.num_received += 1

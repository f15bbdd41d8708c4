"""Signals that ask to stop, kept until a loop asks for them: nothing is interrupted."""

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType


def is_nohup(number: signal.Signals) -> bool:
    """Whether it is SIGHUP in a process that `nohup` started, which is to go on when its terminal is closed."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


class StopSignals:
    """While entered, remembers the first of the signals, and how many requests came. Outside the main thread it changes
    nothing: signals go there. Under `nohup` SIGHUP is no such signal."""

    def __init__(
        self,
        numbers: Sequence[signal.Signals],
        ends_at_once: signal.Signals | None = None,
        one_request_s: float = 0.5,
    ) -> None:
        """ends_at_once: ends the process, as it would without this, where it is not of the first request.

        one_request_s: what comes within this of the first signal is the same request: service managers send SIGHUP
        right after SIGTERM, and each of them to the launcher and to the ranks, to which the launcher passes it on.
        """
        self.received: signal.Signals | None = None
        self.num_received = 0
        self._numbers, self._ends_at_once, self._one_request_s = numbers, ends_at_once, one_request_s
        self._first_at = 0.0
        self._previous: dict = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in self._numbers if not is_nohup(number)]
            self._previous = {number: signal.signal(number, self._remember) for number in heeded}
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
        if self.received is None:
            self.received, self.num_received, self._first_at = signal.Signals(number), 1, time.monotonic()
            return
        if time.monotonic() - self._first_at < self._one_request_s:
            return
        if number == self._ends_at_once:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.num_received += 1

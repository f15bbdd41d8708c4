"""Turns Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal into a question that a loop asks: no stop is interrupted."""

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """While entered, remembers the first stop signal, and how many came. Outside the main thread it changes nothing:
    signals go there."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.num_received = 0
        self._previous: dict = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
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
        self.received = self.received or signal.Signals(number)
        self.num_received += 1

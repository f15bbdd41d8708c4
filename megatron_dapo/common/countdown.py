"""A countdown that can stand still."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Countdown:
    """Seconds until a call; they stand still inside `held`."""

    def __init__(self, seconds: float, on_end: Callable[[], None]) -> None:
        """Begin. Needs a running event loop."""
        self._seconds_left = seconds
        self._on_end = on_end
        self._num_held = 0
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._go_on()

    @contextmanager
    def held(self, times: int = 1) -> Iterator[None]:
        """Stand still inside the block. times: -1 undoes a block around this one."""
        self._hold(times)
        try:
            yield
        finally:
            self._hold(-times)

    def stop(self) -> None:
        """Call nothing any more."""
        self._num_held += 1
        if self._timer is not None:
            self._timer.cancel()

    def _hold(self, change: int) -> None:
        was_held = self._num_held > 0
        self._num_held += change
        if was_held and not self._num_held:
            self._go_on()
        elif self._timer is not None and self._num_held and not was_held:
            self._timer.cancel()
            self._seconds_left -= time.monotonic() - self._began

    def _go_on(self) -> None:
        self._began = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._seconds_left, self._on_end)

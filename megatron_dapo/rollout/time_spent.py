"""Stopwatches for conditions, and a countdown that can stand still."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeSpent:
    """Stopwatch for a condition."""

    def __init__(self) -> None:
        self._since: float | None = None  # None: off
        self._seconds = 0.0

    def switch(self, is_on: bool) -> None:
        """Switch it on or off."""
        now = time.monotonic()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if is_on else None

    @property
    def is_on(self) -> bool:
        """Return whether it is on now."""
        return self._since is not None

    @property
    def has_run(self) -> bool:
        """Return whether it was on since the last `take`."""
        return self._since is not None or self._seconds > 0

    def take(self) -> float:
        """Return the seconds that it was on since the last call."""
        self.switch(self._since is not None)
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


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


class RewardWait:
    """Stopwatch for the time with responses waiting for their rewards and none being written."""

    def __init__(self) -> None:
        self._num_written = 0  # responses being written
        self._num_scored = 0  # responses being scored
        self._spent = TimeSpent()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count a response written inside the block."""
        self._num_written += 1
        self._update()
        try:
            yield
        finally:
            self._num_written -= 1
            self._update()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Count a response scored inside the block."""
        self._num_scored += 1
        self._update()
        try:
            yield
        finally:
            self._num_scored -= 1
            self._update()

    def take(self) -> float:
        """Return the seconds since the last call."""
        return self._spent.take()

    def _update(self) -> None:
        self._spent.switch(self._num_scored > 0 and self._num_written == 0)

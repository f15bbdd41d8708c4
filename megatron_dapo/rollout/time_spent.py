"""Stopwatches for conditions: the seconds during which a condition held."""

import time
from collections.abc import Iterator
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

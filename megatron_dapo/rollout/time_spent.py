"""Seconds in which something was so."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeSpent:
    """Adds up the seconds in which it is on."""

    def __init__(self) -> None:
        self._since: float | None = None  # where it is on
        self._seconds = 0.0

    def turn(self, is_on: bool) -> None:
        """Be on, or off, from now on."""
        now = time.monotonic()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if is_on else None

    @property
    def has_run(self) -> bool:
        """Return whether it was on since the last `take`."""
        return self._since is not None or self._seconds > 0

    def take(self) -> float:
        """Return the seconds, and begin anew."""
        self.turn(self._since is not None)
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class RewardWait:
    """Adds up the seconds in which responses wait for their rewards, and none is being written."""

    def __init__(self) -> None:
        self._num_written = 0  # being
        self._num_scored = 0  # being
        self._spent = TimeSpent()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Have a response written inside the block."""
        self._num_written += 1
        self._turn()
        try:
            yield
        finally:
            self._num_written -= 1
            self._turn()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Have a response wait for its reward inside the block."""
        self._num_scored += 1
        self._turn()
        try:
            yield
        finally:
            self._num_scored -= 1
            self._turn()

    def take(self) -> float:
        """Return the seconds, and begin anew."""
        return self._spent.take()

    def _turn(self) -> None:
        self._spent.turn(self._num_scored > 0 and self._num_written == 0)

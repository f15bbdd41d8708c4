"""Seconds in which something was so."""

import time


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

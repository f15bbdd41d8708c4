"""Means of numbers taken now and then, without keeping the numbers."""

import time


class MeanOverTime:
    """The mean of a number over time."""

    def __init__(self) -> None:
        self._value = 0.0
        self._since = time.monotonic()
        self._sum = 0.0
        self._seconds = 0.0

    def add(self, value: float) -> None:
        """Note that the number is this one from now on."""
        now = time.monotonic()
        self._sum += self._value * (now - self._since)
        self._seconds += now - self._since
        self._value = value
        self._since = now

    def take(self) -> float:
        """Return the mean, and begin anew."""
        mean = self._sum / self._seconds if self._seconds else self._value
        self._sum = 0.0
        self._seconds = 0.0
        return mean


class MeanAndMax:
    """The mean and the largest of counted numbers."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._number = 0
        self._largest = 0.0

    def add(self, value: float) -> None:
        """Count a number, at least 0."""
        self._sum += value
        self._number += 1
        self._largest = max(self._largest, value)

    def take(self) -> tuple[float, float] | None:
        """Return (mean, largest), or None without a number, and begin anew."""
        taken = (self._sum / self._number, self._largest) if self._number else None
        self._sum = 0.0
        self._number = 0
        self._largest = 0.0
        return taken

"""Seconds per phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimers:
    """Collects seconds per phase until they are taken. Time in a nested phase counts only for the
    inner one."""

    def __init__(self, clock=time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []  # per open phase: seconds spent in phases inside it
        self._start: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._clock()
        if self._start is None:
            self._start = start
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase so far."""
        return self._seconds.get(name, 0.0)

    def step_seconds(self) -> float:
        """Return the seconds since the first phase began, or 0 before it."""
        return 0.0 if self._start is None else self._clock() - self._start

    def take(self) -> dict[str, float]:
        """Return {"time/PHASE": seconds ..., "time/step": seconds since the first phase began}, and
        start anew."""
        step = {} if self._start is None else {"time/step": self.step_seconds()}
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()} | step
        self._seconds, self._start = {}, None
        return taken

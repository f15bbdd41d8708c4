"""A clock that jumps to the next event as soon as nothing is left to do.

Hours of sleeping servers then take minutes, and other work on the machine changes no figure.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron_dapo.rewards.reward_pool import RewardPool

_real_now = time.monotonic


class JumpingClock(selectors.DefaultSelector):
    """The clock of an event loop, and the place where the loop waits for its next event.

    All parties live in that loop and talk over loopback. Only reward workers are other processes:
    while a response is scored, the clock stands.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0  # of the real clock, outside of `jumping`
        self._now: float | None = None  # inside
        self._num_scored = 0  # responses under way

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine whose loop, and all Python code, have this clock."""
        with (
            patch("time.monotonic", self.now),
            patch.object(RewardPool, "score", self._standing(RewardPool.score)),
            # a fresh process takes real time
            patch("megatron_dapo.rewards.reward_pool._REQUESTS_PER_WORKER", 10**9),
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self)) as runner,
        ):
            return runner.run(main)

    def now(self) -> float:
        """Return the seconds of the clock."""
        return _real_now() + self._ahead if self._now is None else self._now

    @contextmanager
    def jumping(self) -> Iterator[None]:
        """Let only waiting take time, and no time of ours."""
        self._now = self.now()
        try:
            yield
        finally:
            self._ahead = self._now - _real_now()
            self._now = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what happened; if nothing did, be at the loop's next event."""
        if self._now is None:
            return super().select(timeout)
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self._num_scored or timeout is None:
            return super().select(1.0)
        self._now += timeout
        return []

    def _standing(self, score: Any) -> Any:
        """Return the scoring of a response during which the clock stands."""

        async def scored(pool: RewardPool, *arguments: Any) -> Any:
            self._num_scored += 1
            try:
                return await score(pool, *arguments)
            finally:
                self._num_scored -= 1

        return scored

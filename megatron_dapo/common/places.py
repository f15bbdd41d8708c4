"""Bounds work under way at once, and tells the room that is left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Places:
    """Room for so much work at once. Who waits longest comes first."""

    def __init__(self, number: int) -> None:
        self.on_free: Callable[[], None] = lambda: None
        self._number = number
        self._num_wanted = 0
        self._places = asyncio.Semaphore(number)

    @property
    def num_free(self) -> int:
        """Return the free places, less the work that waits for one."""
        return max(self._number - self._num_wanted, 0)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        self._num_wanted += 1
        try:
            async with self._places:
                yield
        finally:
            self._num_wanted -= 1
            self.on_free()

"""Batches of responses for whoever scores many at once: those that wait when a call becomes free."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Reply = dict[str, Any]
Request = TypeVar("Request")


@dataclass(eq=False)
class _Waiting(Generic[Request]):
    """A response that waits for its verdict. is_alone: its batch failed, so it is asked for by itself."""

    request: Request
    reply: asyncio.Future[Reply]
    is_alone: bool = False


class Batches(Generic[Request]):
    """Puts requests together. A batch that fails is asked for response by response: one bad response costs one."""

    def __init__(self, call: Callable[[Sequence[Request]], Awaitable[Reply]], num_calls: int, batch_size: int) -> None:
        """call: returns {"verdicts": one per request} or {"error": ...}; raises only where the pool is closed.
        num_calls: at most so many at once; batch_size: requests per call, at most."""
        self.num_calls = num_calls
        self._call = call
        self._batch_size = batch_size
        self._waiting: deque[_Waiting[Request]] = deque()
        self._tasks: set[asyncio.Task] = set()

    async def reply(self, request: Request) -> Reply:
        """Return what is said of a response: a verdict, or {"error": ...}."""
        entry = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if len(self._tasks) < self.num_calls:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await entry.reply

    async def close(self) -> None:
        """End what is under way."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._waiting:
            entry.reply.cancel()

    async def _work(self) -> None:
        """Ask for batches as long as something waits."""
        await asyncio.sleep(0)  # so that those that come together are asked for together
        while batch := self._next():
            try:
                reply = await self._call([entry.request for entry in batch])
            except Exception as error:
                _set(batch, error)
                continue
            if "error" in reply and len(batch) > 1:
                for entry in batch:
                    entry.is_alone = True
                self._waiting.extend(batch)
                continue
            verdicts = [reply] if "error" in reply else reply["verdicts"]
            for entry, verdict in zip(batch, verdicts, strict=True):
                if not entry.reply.done():
                    entry.reply.set_result(verdict)

    def _next(self) -> list[_Waiting[Request]]:
        """Return the next batch, without those that nobody waits for any more."""
        batch: list[_Waiting[Request]] = []
        while self._waiting and len(batch) < self._batch_size:
            entry = self._waiting[0]
            if batch and (entry.is_alone or batch[0].is_alone):
                break
            self._waiting.popleft()
            if not entry.reply.done():
                batch.append(entry)
        return batch


def _set(batch: Sequence[_Waiting], error: Exception) -> None:
    for entry in batch:
        if not entry.reply.done():
            entry.reply.set_exception(error)

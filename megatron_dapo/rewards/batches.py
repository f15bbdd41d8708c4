"""Makes batches of waiting responses for scorers of many at once, whenever a call becomes free."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Reply = dict[str, Any]
Request = TypeVar("Request")


@dataclass(eq=False)
class _Waiting(Generic[Request]):
    """A response that waits for its verdict. is_alone: its batch failed, so it gets a call by
    itself."""

    request: Request
    reply: asyncio.Future[Reply]
    is_alone: bool = False


class Batches(Generic[Request]):
    """Batches requests. A failed batch is repeated response by response, so that one bad response
    costs one."""

    def __init__(self, call: Callable[[Sequence[Request]], Awaitable[Reply]], num_calls: int, batch_size: int) -> None:
        """Take the function that scores a batch.

        Args:
            call: returns {"verdicts": one per request} or {"error": ...}; raises only if the pool
                is closed.
            num_calls: the most calls at once.
            batch_size: the most requests per call.
        """
        self.num_calls = num_calls
        self._call = call
        self._batch_size = batch_size
        self._waiting: deque[_Waiting[Request]] = deque()
        self._tasks: set[asyncio.Task] = set()

    async def reply(self, request: Request) -> Reply:
        """Return a response's verdict, or {"error": ...}."""
        entry = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if len(self._tasks) < self.num_calls:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await entry.reply

    async def close(self) -> None:
        """Cancel running calls and waiting requests."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._waiting:
            entry.reply.cancel()

    async def _work(self) -> None:
        """Ask for batches as long as something waits."""
        await asyncio.sleep(0)  # lets simultaneous requests share a batch
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
        """Return the next batch, without abandoned requests."""
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

"""Workers of a coroutine: each answers many requests side by side."""

import asyncio
import logging
from contextlib import suppress

from megatron_dapo.rewards.worker_pool import Worker, WorkerLost, WorkerPool
from megatron_dapo.rewards.worker_process import Message

_CANCEL_S = 2.0
"""How long a worker has to end a request whose time is over. One that does not answer in this time is blocked by it,
with all others, and is killed."""

logger = logging.getLogger(__name__)


class SharedWorkers:
    """All workers of a pool, each borrowed for as long as it lives."""

    def __init__(self, pool: WorkerPool, num_workers: int) -> None:
        self._hosts = [_Host(pool) for _ in range(num_workers)]
        self._changed = asyncio.Condition()  # a request has ended
        self._second_attempt = asyncio.Lock()

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """Return the reply of the worker that has the fewest requests.

        Raises TimeoutError, and WorkerLost. A worker that ends takes all its requests with it, and nobody knows which
        of them ended it: each is asked once more, alone in its worker.
        """
        try:
            return await self._ask_among_others(message, timeout_s)
        except WorkerLost:
            async with self._second_attempt:
                return await self._ask_alone(message, timeout_s)

    async def _ask_among_others(self, message: Message, timeout_s: float) -> Message:
        async with self._changed:
            await self._changed.wait_for(lambda: not all(host.is_reserved for host in self._hosts))
        host = min((host for host in self._hosts if not host.is_reserved), key=lambda host: host.num_requests)
        try:
            return await host.ask(message, timeout_s)
        finally:
            await self._tell_of_change()

    async def _ask_alone(self, message: Message, timeout_s: float) -> Message:
        host = min(self._hosts, key=lambda host: host.num_requests)
        host.is_reserved = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not host.num_requests)
            return await host.ask(message, timeout_s)
        finally:
            host.is_reserved = False
            await self._tell_of_change()

    async def _tell_of_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _Host:
    """A worker, or its replacement, and its requests under way."""

    def __init__(self, pool: WorkerPool) -> None:
        self.is_reserved = False  # for one request: no other may come
        self._pool = pool
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._next_number = 0
        self._task: asyncio.Task | None = None
        self._worker: asyncio.Future[Worker] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._answers)

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """Return the reply. Raises TimeoutError, WorkerLost."""
        number = self._next_number
        self._next_number += 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            worker = await self._borrowed()
            await worker.send({"id": number, **message})
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(answer)
            except (TimeoutError, asyncio.CancelledError):
                await self._cancel(worker, number, answer)
                raise
        finally:
            self._answers.pop(number, None)
            answer.cancel()

    async def _borrowed(self) -> Worker:
        """Return the worker, borrowed if it was not. Raises WorkerLost where it does not start."""
        if self._task is None or self._task.done():
            self._worker = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._read(self._worker))
        assert self._worker is not None
        return await asyncio.shield(self._worker)

    async def _read(self, borrowed: asyncio.Future[Worker]) -> None:
        """Borrow a worker and hand on what it answers, until it is lost."""
        reason: Exception = WorkerLost("the pool is closed")
        try:
            async with self._pool.worker() as worker:
                worker.distrust()  # whoever has it next gets a fresh process: requests may be under way in this one
                borrowed.set_result(worker)
                while True:
                    reply = await worker.receive()
                    answer = self._answers.get(reply.pop("id", None))
                    if answer is not None and not answer.done():
                        answer.set_result(reply)
        except (WorkerLost, RuntimeError) as error:
            reason = error if isinstance(error, WorkerLost) else reason
        finally:
            futures: list[asyncio.Future] = [borrowed, *self._answers.values()]
            for future in futures:
                if not future.done():
                    future.set_exception(reason)
                    future.exception()  # there may be nobody who asks for it

    async def _cancel(self, worker: Worker, number: int, answer: asyncio.Future) -> None:
        """End a request in the worker, or the worker where it does not."""
        with suppress(WorkerLost):
            await worker.send({"cancel": number})
            try:
                async with asyncio.timeout(_CANCEL_S):
                    await asyncio.shield(answer)
            except TimeoutError:
                logger.warning("a reward worker is blocked by a request whose time is over; it is killed")
                worker.kill()

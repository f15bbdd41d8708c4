"""Workers of a coroutine: each answers many requests side by side."""

import asyncio
import logging
from contextlib import suppress

from megatron_dapo.rewards.worker_pool import Worker, WorkerLost, WorkerPool
from megatron_dapo.rewards.worker_process import Message

_CANCEL_S = 2.0

logger = logging.getLogger(__name__)


class _LostTogether(WorkerLost):
    """A worker ended, or was blocked and killed, with `num_requests` requests under way."""

    def __init__(self, reason: str, num_requests: int) -> None:
        super().__init__(reason)
        self.num_requests = num_requests


class SharedWorkers:
    """All workers of a pool, each borrowed for as long as it lives.

    cancel_s: time for a worker to end a cancelled request. A worker that does not answer in this
    time is blocked, by this request or another one, and is killed.
    """

    def __init__(self, pool: WorkerPool, num_workers: int, cancel_s: float | None = None) -> None:
        self._hosts = [_Host(pool, _CANCEL_S if cancel_s is None else cancel_s) for _ in range(num_workers)]
        self._changed = asyncio.Condition()  # a request has ended
        self._num_suspects = 0
        self._suspects_host: _Host | None = None  # no others come there
        self._limits: list[int] = []  # of the suspects under way there

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """Return the reply of the worker with the fewest requests.

        A lost worker takes all its requests with it, and any of them may be the cause. They are
        repeated in one worker, in half the number at once after each loss. The last request left is
        the cause.

        Raises:
            TimeoutError: past the limit.
            WorkerLost: if this request ended its worker.
        """
        limit = None
        try:
            while True:
                try:
                    if limit is None:
                        return await self.ask_once(message, timeout_s)
                    return await self._ask_among_suspects(message, timeout_s, limit)
                except _LostTogether as error:
                    if error.num_requests == 1:
                        raise
                    self._num_suspects += limit is None
                    limit = error.num_requests // 2
        finally:
            if limit is not None:
                self._num_suspects -= 1
                if not self._num_suspects:
                    self._suspects_host = None
                await self._tell_of_change()

    async def ask_once(self, message: Message, timeout_s: float) -> Message:
        """Return the reply, without a repetition. Raises TimeoutError; WorkerLost, which another
        request may have caused."""
        async with self._changed:
            await self._changed.wait_for(self._open_hosts)
        host = min(self._open_hosts(), key=lambda host: host.num_requests)
        try:
            return await host.ask(message, timeout_s)
        finally:
            await self._tell_of_change()

    def _open_hosts(self) -> list["_Host"]:
        return [host for host in self._hosts if host is not self._suspects_host]

    async def _ask_among_suspects(self, message: Message, timeout_s: float, limit: int) -> Message:
        """Send the request with at most `limit` requests under way, itself included, all of them
        suspects."""
        if self._suspects_host is None:
            self._suspects_host = min(self._hosts, key=lambda host: host.num_requests)
        host = self._suspects_host

        def may_enter() -> bool:
            num_others = host.num_requests - len(self._limits)
            return not num_others and len(self._limits) < min([limit, *self._limits])

        async with self._changed:
            await self._changed.wait_for(may_enter)
        self._limits.append(limit)
        try:
            return await host.ask(message, timeout_s)
        finally:
            self._limits.remove(limit)
            await self._tell_of_change()

    async def _tell_of_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _Host:
    """A worker, or its replacement, and its requests under way."""

    def __init__(self, pool: WorkerPool, cancel_s: float) -> None:
        self._pool = pool
        self._cancel_s = cancel_s
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._next_number = 0
        self._reading: asyncio.Task | None = None
        self._worker: asyncio.Future[Worker] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._answers)

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """Return the reply. Raises TimeoutError, _LostTogether."""
        number = self._next_number
        self._next_number += 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            worker = await self._borrowed()
            try:
                async with asyncio.timeout(timeout_s):
                    with suppress(WorkerLost):  # as the answer says then
                        await worker.send({"id": number, **message})
                    return await asyncio.shield(answer)
            except (TimeoutError, asyncio.CancelledError) as error:
                try:
                    await self._cancel(worker, number, answer)
                except _LostTogether as lost:
                    if isinstance(error, TimeoutError) and lost.num_requests > 1:
                        raise  # another may have blocked the worker
                raise
        finally:
            self._answers.pop(number, None)
            answer.cancel()

    async def _borrowed(self) -> Worker:
        """Return the worker, borrowed if necessary. Raises _LostTogether if it does not start."""
        if self._reading is None or self._reading.done():
            self._worker = asyncio.get_running_loop().create_future()
            self._reading = asyncio.create_task(self._read(self._worker))
        assert self._worker is not None
        return await asyncio.shield(self._worker)

    async def _read(self, borrowed: asyncio.Future[Worker]) -> None:
        """Borrow a worker and pass on its answers, until it is lost."""
        reason = "the pool is closed"
        try:
            async with self._pool.worker() as worker:
                # its next user gets a fresh process: requests may be under way in this one
                worker.distrust()
                borrowed.set_result(worker)
                while True:
                    reply = await worker.receive()
                    answer = self._answers.get(reply.pop("id", None))
                    if answer is not None and not answer.done():
                        answer.set_result(reply)
        except WorkerLost as error:
            reason = str(error)
        except asyncio.CancelledError:
            reason = "it was blocked"
        except RuntimeError:
            pass
        finally:
            futures: list[asyncio.Future] = [borrowed, *self._answers.values()]
            for future in futures:
                if not future.done():
                    future.set_exception(_LostTogether(reason, len(self._answers)))
                    future.exception()  # its caller may be gone

    async def _cancel(self, worker: Worker, number: int, answer: asyncio.Future) -> None:
        """End a request in the worker, or else the worker. Raises _LostTogether."""
        reading = self._reading
        assert reading is not None, "the worker is borrowed"
        sending = asyncio.create_task(worker.send({"cancel": number}))
        # asyncio.timeout in a cancelled task ends it without TimeoutError before Python 3.11.4
        await asyncio.wait({answer}, timeout=self._cancel_s)
        sending.cancel()
        await asyncio.wait({sending})
        if not sending.cancelled():
            sending.exception()  # WorkerLost, as the answer says then
        if not answer.done() and not reading.cancelling():
            logger.warning("a worker is blocked by a request past its limit; it is killed")
            reading.cancel()
        await answer

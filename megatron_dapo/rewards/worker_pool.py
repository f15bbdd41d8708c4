"""Worker processes for code that may hang, crash or eat memory: started, called, killed and
replaced.

A worker belongs to one caller at a time. The event loop never blocks, and none of that code runs in
it.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.worker_process import Message

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_PIPE_LIMIT_BYTES = 1 << 24  # of a line; an agent's answer is the longest
_WORKER_ERRORS = (OSError, EOFError, TypeError, ValueError)  # no pipe, no reply, no JSON either way

logger = logging.getLogger(__name__)


class WorkerLost(RuntimeError):
    """The process ended, did not start, or did not speak the protocol."""


class Worker:
    """One worker process and its pipe.

    Args:
        module: run with `python -m`; it calls worker_process.serve.
        settings: the first message to it; `greeting` is its answer.
        environment: all of its variables.
    """

    def __init__(self, module: str, settings: Message, environment: Mapping[str, str]) -> None:
        self.module = module
        self.settings = settings
        self.greeting: Message = {}
        self._environment = environment
        self.num_served = 0
        self._is_asked = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether it runs and is not in the middle of a request, as it is after a cancelled
        one."""
        return self._process is not None and self._process.returncode is None and not self._is_asked

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if it is not running."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process. Raises UserError if it refuses its settings, WorkerLost if it does not
        start."""
        self.num_served = 0
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self.module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=_PIPE_LIMIT_BYTES,
            start_new_session=True,  # untouched by Ctrl-C
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self.greeting = await self._exchange(self.settings)
        except TimeoutError:
            await self.stop()
            raise WorkerLost(f"{self.module} {self.pid} was not ready within {_START_TIMEOUT_S:g} s") from None
        if "user_error" in self.greeting:
            await self.stop()
            raise UserError(self.greeting["user_error"])

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """Return the reply.

        Raises TimeoutError, or WorkerLost; after either, or when cancelled, the worker is not
        ready.
        """
        self.num_served += 1
        async with asyncio.timeout(timeout_s):
            return await self._exchange(message)

    def kill(self) -> None:
        """Have its guard kill the process and all it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # gone already
                self._process.terminate()

    def distrust(self) -> None:
        """Mark it as not ready, regardless of its last answer."""
        self._is_asked = True

    async def stop(self) -> None:
        """Kill it, wait until the process is gone, and close its pipes. No request may be in
        flight."""
        self.kill()
        process = self._process
        self._process = None
        self._is_asked = False
        if process is None:
            return
        requests, replies = _pipes(process)
        requests.close()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await requests.wait_closed()
                await replies.read()
        with suppress(ProcessLookupError):
            # the usual case; a guard that was stopped or starved ends here
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _exchange(self, message: Message) -> Message:
        self._is_asked = True
        await self.send(message)
        reply = await self.receive()
        self._is_asked = False
        return reply

    async def send(self, message: Message) -> None:
        """Write a message. Raises WorkerLost."""
        requests, _ = _pipes(self._process)
        with self._losses():
            requests.write(json.dumps(message, default=str).encode() + b"\n")
            await requests.drain()

    async def receive(self) -> Message:
        """Return the next message that it writes. Raises WorkerLost."""
        process = self._process
        _, replies = _pipes(process)
        with self._losses():
            line = await replies.readline()
            if not line.endswith(b"\n"):
                raise EOFError(f"it ended with code {await process.wait() if process else None}")
            reply = json.loads(line)
            if not isinstance(reply, dict):
                raise ValueError(f"it answered {line[:100]!r}")
            return reply

    @contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except _WORKER_ERRORS as error:
            raise WorkerLost(f"{self.module} {self.pid}: {error}") from error


def _pipes(process: asyncio.subprocess.Process | None) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    """Return the pipes of a worker: for requests, and for replies."""
    assert process is not None, "start() comes first"
    assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
    return process.stdin, process.stdout


class WorkerPool:
    """`num_workers` workers of one module, with these settings and environment variables.

    Args:
        requests_per_worker: replace a worker after so many; None: never.
        closing: a message to a returned worker, to be answered within closing_timeout_s before the
            next caller gets it; None: no message.
    """

    def __init__(
        self,
        module: str,
        settings: Message,
        environment: Mapping[str, str],
        num_workers: int,
        requests_per_worker: int | None = None,
        closing: Message | None = None,
        closing_timeout_s: float = 0.0,
    ) -> None:
        self._workers = [Worker(module, settings, environment) for _ in range(num_workers)]
        self._requests_per_worker = requests_per_worker
        self._closing = closing
        self._closing_timeout_s = closing_timeout_s
        self._free: asyncio.Queue[Worker] = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()
        self._open = False

    @property
    def greeting(self) -> Message:
        """Return the workers' answer to their settings."""
        return self._workers[0].greeting

    async def start(self) -> None:
        """Start all workers. Raises UserError if they refuse their settings, WorkerLost if one does
        not start."""
        results = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(worker.stop() for worker in self._workers))
            raise errors[0]
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._open = True

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """Lend a worker for a while; wait until one is free.

        A worker not ready afterwards is replaced.

        Raises WorkerLost if it does not start, RuntimeError outside start() ... close().
        """
        self._check_open()
        worker = await self._free.get()
        try:
            self._check_open()
            if not worker.is_ready:  # its replacement failed
                await worker.start()
            yield worker
        finally:  # also on cancellation
            self._give_back(worker)

    async def close(self) -> None:
        """End all workers; requests in flight raise WorkerLost. Idempotent."""
        if not self._open:
            return
        self._open = False
        for worker in self._workers:
            worker.kill()
        for _ in self._workers:
            await self._free.get()  # each comes back once its request or its replacement is over
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the worker pool is not started, or closed")

    def _give_back(self, worker: Worker) -> None:
        if not self._open or (self._is_usable(worker) and self._closing is None):
            self._free.put_nowait(worker)
            return
        task = asyncio.get_running_loop().create_task(self._renew(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_usable(self, worker: Worker) -> bool:
        return worker.is_ready and (self._requests_per_worker is None or worker.num_served < self._requests_per_worker)

    async def _renew(self, worker: Worker) -> None:
        """Send the closing message, replace an unusable worker, and release it for the next
        caller."""
        try:
            if worker.is_ready and self._closing is not None:
                with suppress(WorkerLost, TimeoutError):  # not ready then
                    await worker.ask(self._closing, self._closing_timeout_s)
            if not self._is_usable(worker):
                await worker.stop()
                if self._open:
                    await worker.start()
        except (WorkerLost, UserError, OSError) as error:
            if self._open:  # the next asker tries again
                logger.error("a worker did not come back: %s", error)
        finally:
            self._free.put_nowait(worker)

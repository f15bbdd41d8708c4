"""Talking to all servers at once, from a thread of its own, so that transfers go on while the trainer gathers."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from megatron_dapo.weight_sync.errors import WeightSyncError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PROBE_S = 2.0
"""How long a server may take to say that it is alive, once something went wrong."""


class ServerControl(Protocol):
    """The administrative calls of one server. Every call raises when the server refuses or does not answer."""

    url: str

    async def server_info(self) -> dict: ...
    async def pause(self) -> None: ...
    async def continue_(self) -> None: ...
    async def begin_weight_update(self) -> None: ...
    async def end_weight_update(self) -> None: ...
    async def weight_version(self) -> int | str: ...
    async def checksums(self) -> list[dict[str, str]]:
        """Of each tensor-parallel rank of the server, in rank order: parameter name -> checksum."""
        ...

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None: ...

    async def destroy_weights_update_group(self, group_name: str) -> None: ...

    async def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        weight_version: int,
        flush_cache: bool,
        load_format: str | None,
    ) -> None: ...

    async def close(self) -> None: ...


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class Call:
    """A request under way, and who must answer it."""

    url: str
    answer: Future


def reason(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def blame(why: dict[str, str]) -> str:
    """Servers by URL, each with what is wrong with it."""
    return "; ".join(text if url in text else f"server {url}: {text}" for url, text in why.items())


class ServerCalls:
    """Calls to a set of servers, run by an event loop in a background thread."""

    def __init__(self, servers: Sequence[ServerControl]) -> None:
        self.servers = list(servers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sync-http", daemon=True)
        self._thread.start()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def start(self, call: Callable[[ServerControl], Awaitable[Result]], timeout_s: float) -> list[Call]:
        """Begin a call to every server."""
        return [
            Call(s.url, asyncio.run_coroutine_threadsafe(_limited(call, s, timeout_s), self._loop))
            for s in self.servers
        ]

    def all(self, phase: str, deadline: Deadline, call: Callable[[ServerControl], Awaitable[Result]]) -> list[Result]:
        """Answers of all servers, in order. Raises WeightSyncError naming every server that gave none."""
        calls = self.start(call, deadline.left())
        errors = {c.url: error for c in calls if (error := c.answer.exception()) is not None}
        if errors:
            raise WeightSyncError(f"{phase}: " + blame({url: reason(e) for url, e in errors.items()}))
        return [c.answer.result() for c in calls]

    def failures(self, timeout_s: float, call: Callable[[ServerControl], Awaitable[object]]) -> dict[str, str]:
        """Which servers do not answer within timeout_s, and why; raises nothing."""
        calls = self.start(call, timeout_s)
        return {c.url: reason(error) for c in calls if (error := c.answer.exception()) is not None}

    def close(self) -> None:
        """End the servers' connections and the thread."""
        self.failures(PROBE_S, lambda server: server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PROBE_S)


async def answering(server: ServerControl, timeout_s: float) -> tuple[str, int]:
    """(weight version, tensor-parallel size) of a server; waits for one that is being restarted."""
    deadline = Deadline(timeout_s)
    while True:
        try:
            version = await server.weight_version()
            info = await server.server_info()
            return str(version), int(info.get("tp_size", 1))
        except Exception as error:
            if deadline.left() < 1.0:
                raise TimeoutError(f"no answer in {timeout_s:.0f} s, last {reason(error)}") from error
        await asyncio.sleep(0.5)


async def begin(server: ServerControl) -> None:
    """Open an update session; one that a trainer left open when it died is closed first."""
    try:
        await server.begin_weight_update()
    except Exception:  # a refusal has the client's own type; had it another reason, the calls below meet it again
        await server.end_weight_update()
        await server.begin_weight_update()


async def set_going(server: ServerControl) -> None:
    """After a failed push: close the session, if one is open, and let the server generate again."""
    try:
        await server.end_weight_update()
    except Exception as error:  # most often: none is open
        log.info("weight sync: %s kept no session to close: %s", server.url, reason(error))
    await server.continue_()


async def _limited(
    call: Callable[[ServerControl], Awaitable[Result]], server: ServerControl, timeout_s: float
) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await call(server)
    except TimeoutError:
        raise TimeoutError(f"no answer in {timeout_s:.1f} s") from None

"""Talking to several servers at once, from a thread of its own, so that transfers go on while the trainer gathers."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PROBE_S = 2.0
"""How long a server may take to say that it is alive, once something went wrong."""

BACKGROUND_S = 60.0
"""How long a call may take that nobody waits for."""


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
        weight_version: int | None,
        flush_cache: bool,
        load_format: str | None,
    ) -> None: ...

    async def close(self) -> None: ...


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
    """Calls to servers, by their URLs, run by an event loop in a background thread."""

    def __init__(self, connect: Callable[[str], ServerControl]) -> None:
        """connect: URL -> how the server there is asked; called once per URL."""
        self._connect = connect
        self._servers: dict[str, ServerControl] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sync-http", daemon=True)
        self._thread.start()

    def start(
        self, urls: Iterable[str], call: Callable[[ServerControl], Awaitable[Result]], timeout_s: float
    ) -> list[Call]:
        """Begin a call to every one of these servers."""
        return [
            Call(url, asyncio.run_coroutine_threadsafe(_limited(call, self._server(url), timeout_s), self._loop))
            for url in urls
        ]

    def ask(
        self, urls: Iterable[str], call: Callable[[ServerControl], Awaitable[Result]], timeout_s: float
    ) -> tuple[dict[str, Result], dict[str, str]]:
        """URL -> answer of the servers that gave one within timeout_s; URL -> why not of the others. Raises nothing."""
        calls = self.start(urls, call, timeout_s)
        failures = {c.url: reason(error) for c in calls if (error := c.answer.exception()) is not None}
        return {c.url: c.answer.result() for c in calls if c.url not in failures}, failures

    def close(self) -> None:
        """End what is under way, the servers' connections and the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(PROBE_S)
        self.ask(self._servers, lambda server: server.close(), PROBE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PROBE_S)

    def _server(self, url: str) -> ServerControl:
        if url not in self._servers:
            self._servers[url] = self._connect(url)
        return self._servers[url]


@dataclass(frozen=True)
class Entrant:
    """A server that takes part in a push. version: what it holds; size: its tensor-parallel ranks."""

    version: str
    size: int


async def enter(server: ServerControl) -> Entrant:
    """Have the server pause and open an update session."""
    version = await server.weight_version()
    info = await server.server_info()
    await server.pause()
    try:
        await server.begin_weight_update()
    except Exception:  # a refusal has the client's own type; had it another reason, the calls below meet it again
        await server.end_weight_update()  # that of a trainer that died
        await server.begin_weight_update()
    return Entrant(str(version), int(info.get("tp_size", 1)))


async def come_back(server: ServerControl) -> None:
    """After a failed attempt: close the session and go on. A server that was started again has no session: it fails,
    as one that is gone."""
    await server.end_weight_update()
    await server.continue_()


async def set_going(server: ServerControl) -> None:
    """Close the session, if one is open, and let the server generate again."""
    try:
        await server.end_weight_update()
    except Exception as error:  # most often: none is open
        log.info("weight sync: %s kept no session to close: %s", server.url, reason(error))
    await server.continue_()


async def _cancel_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _limited(
    call: Callable[[ServerControl], Awaitable[Result]], server: ServerControl, timeout_s: float
) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await call(server)
    except TimeoutError:
        raise TimeoutError(f"no answer in {timeout_s:.1f} s") from None

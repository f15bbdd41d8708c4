"""Calls several servers at once, from a separate thread, so that transfers continue while the
trainer gathers."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from megatron_dapo.config.schema.run import PauseMode
from megatron_dapo.servers.server_versions import require_weight_form

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PROBE_S = 2.0
"""How long a server may take to say that it is alive, once something went wrong."""

BACKGROUND_S = 60.0
"""Time limit of a call in the background."""

FINISH_BATCH_S = 1.0
"""Time for a server paused in place to finish the batch on its GPU: SGLang does not wait for it
before it takes weights. At least as long as one chunk of a prefill."""

UNFINISHED_VERSION = -1
"""The servers' version between the first bucket of a push and the last. No token with this version
is accepted."""


class ServerControl(Protocol):
    """The administrative calls of one server. Every call raises when the server refuses or does not
    answer."""

    url: str

    async def server_info(self) -> dict: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def continue_(self) -> None: ...
    async def begin_weight_update(self) -> None: ...
    async def end_weight_update(self) -> None: ...
    async def weight_version(self) -> int | str: ...
    async def checksums(self) -> Sequence[dict[str, str]]:
        """Return, for each tensor-parallel rank of the server in rank order, its checksums by
        parameter name."""
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

    async def update_weights_from_tensor(
        self, serialized: Sequence[str], *, weight_version: int, flush_cache: bool
    ) -> None: ...

    async def release_memory(self, tags: Sequence[str]) -> None: ...
    async def resume_memory(self, tags: Sequence[str]) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """A request under way, and who must answer it."""

    url: str
    answer: Future


def reason(error: BaseException) -> str:
    """Return an exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def culprits(why: Mapping[str, str]) -> str:
    """Return the servers by URL, each with its fault."""
    return "; ".join(text if url in text else f"server {url}: {text}" for url, text in why.items())


class _Servers(dict[str, ServerControl]):
    """URL -> client of the server, made at its first use."""

    def __init__(self, connect: Callable[[str], ServerControl]) -> None:
        super().__init__()
        self._connect = connect

    def __missing__(self, url: str) -> ServerControl:
        self[url] = self._connect(url)
        return self[url]


class ServerCalls:
    """Calls to servers, by their URLs, run by an event loop in a background thread."""

    def __init__(self, connect: Callable[[str], ServerControl]) -> None:
        """Prepare the calls. `connect` takes a URL and returns the means to ask the server there;
        it is called once per URL. The thread starts with the first call."""
        self._servers = _Servers(connect)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sync-http", daemon=True)

    def start(
        self, urls: Iterable[str], call: Callable[[ServerControl], Awaitable[Result]], timeout_s: float
    ) -> list[Call]:
        """Begin a call to every one of these servers."""
        if self._thread.ident is None:
            self._thread.start()
        calls = []
        for url in urls:
            limited = _limited(call, self._servers[url], timeout_s)
            calls.append(Call(url, asyncio.run_coroutine_threadsafe(limited, self._loop)))
        return calls

    def ask(
        self, urls: Iterable[str], call: Callable[[ServerControl], Awaitable[Result]], timeout_s: float
    ) -> tuple[dict[str, Result], dict[str, str]]:
        """Return URL -> answer of the servers in time, and URL -> error of the others. Raises
        nothing."""
        answers: dict[str, Result] = {}
        failures: dict[str, str] = {}
        for request in self.start(urls, call, timeout_s):
            error = request.answer.exception()
            if error is None:
                answers[request.url] = request.answer.result()
            else:
                failures[request.url] = reason(error)
        return answers, failures

    def close(self) -> None:
        """End running calls, the servers' connections and the thread."""
        if self._thread.ident is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(PROBE_S)
        self.ask(list(self._servers), lambda server: server.close(), PROBE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PROBE_S)


@dataclass(frozen=True)
class ServerMember:
    """A server in a push. version: of its weights; size: its tensor-parallel ranks."""

    version: str
    size: int


async def pause(
    server: ServerControl, mode: PauseMode, known: Mapping[str, ServerMember], in_blocks: bool
) -> ServerMember:
    """Have the server pause and open an update session; return its version and size.
    Raise UserError for one that was not started for these weights.

    Args:
        mode: `weight_sync.pause_mode`.
        known: URL -> the server after the last push. With an unchanged version it was not
            restarted, and its size is reused: SGLang takes long to answer `server_info`.
        in_blocks: whether FP8 blocks are pushed.
    """
    version = str(await server.weight_version())
    member = known.get(server.url)
    if member is None or member.version != version:
        info = await server.server_info()
        require_weight_form(server.url, info, in_blocks)
        member = ServerMember(version, int(info.get("tp_size", 1)))
    await server.pause(mode)
    if mode == "in_place":
        await asyncio.sleep(FINISH_BATCH_S)
    await open_session(server)
    return member


async def open_session(server: ServerControl) -> None:
    """Open an update session, in place of one left open by a trainer that died."""
    try:
        await server.begin_weight_update()
    except Exception:
        # a refusal has the client's own type; had it another reason, the calls below meet it again
        await server.end_weight_update()
        await server.begin_weight_update()


async def resume(server: ServerControl) -> None:
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

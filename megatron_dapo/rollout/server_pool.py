"""Which server a request goes to: the least loaded one that is up and holds the current weights."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from megatron_dapo.rollout.client import ServerError, SGLangClient
from megatron_dapo.rollout.errors import NeedsSync, RolloutError

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0


class State(Enum):
    DOWN = "down"  # does not answer
    STALE = "stale"  # answers, with other weights than the trainer's
    CURRENT = "current"


@dataclass
class Server:
    client: SGLangClient
    state: State = State.DOWN
    num_in_flight: int = 0

    @property
    def url(self) -> str:
        return self.client.url


class ServerPool:
    """The servers of the run and what is known of them.

    A server that does not answer is left alone until its health check passes again; one that answers with another
    weight version than `expect` named is left alone until the next `expect`.

    max_concurrency: requests in flight per server. down_timeout_s: how long all servers may be down at once.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        max_concurrency: int,
        down_timeout_s: float,
        probe_interval_s: float,
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self.version: int | None = None
        self._max_concurrency = max_concurrency
        self._down_timeout_s = down_timeout_s
        self._probe_interval_s = probe_interval_s
        self._all_down_since: float | None = None
        self._failure: RolloutError | None = None
        self._waiters: deque[asyncio.Future] = deque()
        self._watch: asyncio.Task | None = None

    async def start(self, timeout_s: float) -> None:
        """Wait until every server is healthy. Raises RolloutError naming those that are not after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while await self._probe(self.urls(State.DOWN)):
            missing = self.urls(State.DOWN)
            if time.monotonic() >= deadline:
                raise RolloutError(
                    f"{len(missing)} of {len(self.servers)} SGLang servers are not healthy after {timeout_s:g} s "
                    f"(actor_rollout_ref.rollout.server.startup_timeout_s): {', '.join(missing)}; see their log files."
                )
            await asyncio.sleep(min(self._probe_interval_s, max(deadline - time.monotonic(), 0)))
        self._watch = asyncio.create_task(self._watch_down_servers())

    async def expect(self, version: int) -> None:
        """From now on only samples of this weight version count. Asks every server for its own."""
        self.version = version
        self._failure = None
        self._all_down_since = None
        await self._probe([server.url for server in self.servers])

    def urls(self, state: State) -> list[str]:
        return [server.url for server in self.servers if server.state is state]

    def in_flight(self) -> dict[str, int]:
        """url -> requests in flight, where there are any."""
        return {server.url: server.num_in_flight for server in self.servers if server.num_in_flight}

    @asynccontextmanager
    async def slot(self, avoid: Collection[str] = (), prefer: str | None = None) -> AsyncIterator[Server]:
        """A place on a current server: one outside `avoid` if such a one is free; of those `prefer`, which knows the
        beginning of the text, or else the least loaded.

        Waits while all are full, or down. Raises NeedsSync if the only servers that answer are stale, RolloutError
        if all have been down for down_timeout_s.
        """
        while (server := self._pick(avoid, prefer)) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        server.num_in_flight += 1
        try:
            yield server
        finally:
            server.num_in_flight -= 1
            self._wake(1)

    def mark_down(self, server: Server, reason: str) -> None:
        if server.state is not State.DOWN:
            log.warning("server %s is down: %s", server.url, reason)
        self._set_state(server, State.DOWN)

    def mark_stale(self, server: Server, reason: str) -> None:
        if server.state is not State.STALE:
            log.warning("server %s needs the weights: %s", server.url, reason)
        self._set_state(server, State.STALE)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for server in self.servers:
            await server.client.close()

    def _pick(self, avoid: Collection[str], prefer: str | None) -> Server | None:
        if self._failure is not None:
            raise self._failure
        current = [server for server in self.servers if server.state is State.CURRENT]
        if not current and (stale := self.urls(State.STALE)):
            raise NeedsSync(f"no server holds weight version {self.version}; push it to: {', '.join(stale)}")
        free = [server for server in current if server.num_in_flight < self._max_concurrency]
        return min(
            free,
            key=lambda server: (server.url in avoid, server.url != prefer, server.num_in_flight),
            default=None,
        )

    def _wake(self, num_waiters: int | None = None) -> None:
        """Let the longest waiting (or, with None, all) look again."""
        while self._waiters and num_waiters != 0:
            waiter = self._waiters.popleft()
            if not waiter.done():  # a cancelled request leaves its waiter behind
                waiter.set_result(None)
                num_waiters = None if num_waiters is None else num_waiters - 1

    def _set_state(self, server: Server, state: State) -> None:
        is_news = server.state is not state
        server.state = state
        if any(server.state is not State.DOWN for server in self.servers):
            self._all_down_since = None
        elif self._all_down_since is None:
            self._all_down_since = time.monotonic()
        if is_news:
            self._wake()

    async def _probe(self, urls: Collection[str]) -> bool:
        """Ask these servers for health and weight version, all at once. True if some server is still down."""
        await asyncio.gather(*(self._probe_one(server) for server in self.servers if server.url in urls))
        return bool(self.urls(State.DOWN))

    async def _probe_one(self, server: Server) -> None:
        try:
            if server.state is State.DOWN:
                await server.client.health(_PROBE_TIMEOUT_S)
            version = await server.client.weight_version(_PROBE_TIMEOUT_S)
        except ServerError as error:
            self.mark_down(server, str(error))
            return
        if self.version is not None and version != self.version:
            self.mark_stale(server, f"it holds version {version}, the trainer {self.version}")
        else:
            self._set_state(server, State.CURRENT)

    async def _watch_down_servers(self) -> None:
        while True:
            await asyncio.sleep(self._probe_interval_s)
            if self.urls(State.DOWN):
                await self._probe(self.urls(State.DOWN))
            since = self._all_down_since
            if since is not None and time.monotonic() - since > self._down_timeout_s:
                self._failure = RolloutError(
                    f"all SGLang servers have been down for {self._down_timeout_s:g} s: "
                    f"{', '.join(self.urls(State.DOWN))}; see their log files."
                )
                self._wake()

"""The servers of a run; a request goes to the least loaded one with the current weights."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Aborted, NeedsSync, RolloutError, ServersLost, ServersMissing
from megatron_dapo.servers.client import FOREIGN_VERSION, SGLangClient
from megatron_dapo.servers.followed_lease import turn_awake
from megatron_dapo.servers.running_means import MeanAndMax, MeanOverTime
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_error import KeyRefused, ServerError
from megatron_dapo.servers.server_health import ServerEvent, ServerState
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.storage.lease import LeaseFolder

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0
_MISSES = 3
"""Health checks in a row that a server at work may miss: a busy one is not lost."""

PAUSE_S = 30.0
"""How long a server with requests may be paused by others than a push."""

_ABORT_INTERVAL_S = 0.1
# for one call: after an answer a server is asked again, without waiting for the slow ones
_ABORT_CALL_S = 0.5


class ServerPool:
    """The servers of the run, of changing number, with their states (`server_health.py`).

    Only current servers get requests. A server in the state BEHIND finishes the requests that still
    accept its version. A paused server with the right weights is told to continue: by `expect` at
    once, with requests once no push takes that long.

    All servers are watched, also at work: requests at a lost one end at once with a ServerError. A
    server no longer listed finishes its requests, and is watched until then.

    With shared GPUs servers are asked nothing while they sleep, and a paused one is never told to
    continue: it may sleep, or lack the push of its weights. It is BEHIND, whatever its version.
    """

    def __init__(
        self,
        listed: ServerList,
        max_concurrency: int,
        down_timeout_s: float,
        probe_interval_s: float,
        connect: Callable[[str], SGLangClient] = SGLangClient,
        report_unresponsive: Callable[[dict[str, str]], None] = lambda why: None,
        push_s: float = 0.0,
        keeps_caches: bool = False,
        lease: LeaseFolder | None = None,
    ) -> None:
        """Prepare; `start` asks the servers.

        Args:
            listed: the URLs at any time.
            max_concurrency: requests in flight per server.
            down_timeout_s: how long all servers may be down at once.
            probe_interval_s: between two looks at a server.
            connect: makes the client of a URL.
            report_unresponsive: called with servers (URL -> why) that missed their health checks.
            push_s: how long a push may pause servers with requests; 0 = pushes come between
                requests.
            keeps_caches: a push leaves the prefixes read by older weights in the servers' caches.
            lease: of shared GPUs. `start` and `expect` come while it is the servers'.
        """
        self.servers: list[Server] = []
        self.version: int | None = None
        self.is_aborting = False
        self._listed = listed
        self._connect = connect
        self._report_unresponsive = report_unresponsive
        # all servers ever listed: their clients are closed in the end
        self._known: dict[str, Server] = {}
        self._max_concurrency = max_concurrency
        self._down_timeout_s = down_timeout_s
        self._probe_interval_s = probe_interval_s
        self._all_down_since: float | None = None
        self._failure: RolloutError | None = None
        self._watch_failure: RolloutError | None = None
        self._push_s = push_s
        self._lease = lease
        # a server outlives a run: prefixes read by other runs at the same version, by other
        # weights, are not this run's
        self._salt = uuid.uuid4().hex if keeps_caches else None
        self._waiters: deque[asyncio.Future] = deque()
        self._num_waiting = 0  # requests waiting for a slot, also those just woken
        self._slots_changed = asyncio.Event()  # the next time
        self._watches: dict[str, asyncio.Task] = {}
        self._watch: asyncio.Task | None = None
        self._capacity = MeanOverTime()
        self._slots_used = MeanOverTime()
        self._without_requests = MeanOverTime()
        self._kv_used = MeanAndMax()

    async def start(self, timeout_s: float) -> None:
        """Wait until every listed server is healthy, and for a list with a server; then watch them.

        Raises ServersMissing naming the servers still unhealthy after timeout_s, UserError for a
        list with a mistake, and at once for a refused key.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._take_list(self._listed.read())
            await self._probe(self.urls(ServerState.DOWN))
            missing = self.urls(ServerState.DOWN)
            if self.servers and not missing:
                break
            if time.monotonic() >= deadline:
                limit = f"after {timeout_s:g} s (actor_rollout_ref.rollout.server.startup_timeout_s)"
                if not self.servers:
                    raise RolloutError(f"{limit} there is no SGLang server: {self._listed}.")
                raise ServersMissing(
                    f"{len(missing)} of {len(self.servers)} SGLang servers are not healthy {limit}: "
                    f"{', '.join(missing)}; see their log files."
                )
            await asyncio.sleep(min(self._probe_interval_s, max(deadline - time.monotonic(), 0)))
        self._watch = self._keep_watching(self._watch_all())
        self._follow()

    async def expect(self, version: int) -> None:
        """Send requests only to servers with this weight version from now on.

        Ask every server for its own, except ill ones. Requests in flight go on.
        """
        self.version = version
        self._failure = None
        self._all_down_since = None
        self._take_list(self._listed.read_or_keep())
        self._follow()
        await self._probe([server.url for server in self.servers if server.state is not ServerState.ILL])
        self._account()  # of a world without servers too

    def mean_num_current(self) -> float:
        """Return the mean number of current servers since the last call."""
        self._account()
        return self._capacity.take()

    def mean_slots_used(self) -> float:
        """Return the mean share of occupied slots of current servers since the last call."""
        self._account()
        return self._slots_used.take()

    def mean_without_requests(self) -> float:
        """Return the mean share of idle servers among the answering ones since the last call."""
        self._account()
        return self._without_requests.take()

    def take_kv_used(self) -> tuple[float, float] | None:
        """Return (mean, largest) share of a KV cache in use, over the looks since the last call.

        Only servers with requests are looked at. None without a look.
        """
        return self._kv_used.take()

    def forget_means(self) -> None:
        """Restart the means over time."""
        self.mean_num_current()
        self.mean_slots_used()

    def urls(self, *states: ServerState) -> list[str]:
        """Return the listed servers in these states."""
        return [server.url for server in self.servers if server.state in states]

    def in_flight(self) -> dict[str, int]:
        """Return url -> requests in flight, of servers with any."""
        return {server.url: server.num_in_flight for server in self.servers if server.num_in_flight}

    @property
    def cache_salt(self) -> str | None:
        """Return the prefix-cache salt of new trajectories; it changes with the weight version.

        None if servers forget cached prefixes at each push.

        `expect` changes the salt, a while after the push. A trajectory begun meanwhile has the old
        salt: the new weights write it, and its tokens say so, but its prefix may come from the old
        ones. A push does the same to all responses interrupted by it: their log-probs are the
        sampled ones, and the loss corrects for the rest. An evaluation never meets this, since
        `expect` comes first.

        The salt must not change earlier: no server without a version may fill the cache under that
        version's salt.
        """
        return f"{self._salt}-{self.version}" if self._salt else None

    @property
    def num_free_slots(self) -> int:
        """Return the free slots of current servers, less the requests waiting for one."""
        current = (server for server in self.servers if server.state is ServerState.CURRENT)
        free = sum(max(self._max_concurrency - server.num_in_flight, 0) for server in current)
        return max(free - self._num_waiting, 0)

    async def wait_for_slot_change(self) -> None:
        """Wait until a slot becomes free, or a server's state changes.

        Raises RolloutError if all servers have been down for down_timeout_s, or are watched no
        more.
        """
        self._raise_failure()
        await self._slots_changed.wait()
        self._raise_failure()

    @asynccontextmanager
    async def slot(self, avoid: Collection[str] = (), prefer: str | None = None) -> AsyncIterator[Server]:
        """Hold a slot of a current server; wait while all are full or down.

        avoid: servers to take only if no other is free.
        prefer: the server with the text's prefix in its cache; else the least loaded.

        Raises NeedsSync if all answering servers are behind, RolloutError if all have been down for
        down_timeout_s, Aborted while requests are aborted.
        """
        self._num_waiting += 1
        try:
            while (server := self._pick(avoid, prefer)) is None:
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await waiter
        except BaseException:  # it may have been woken for a slot, taken then by another request
            self._wake(1)
            raise
        finally:
            self._num_waiting -= 1
        server.num_in_flight += 1
        self._account()
        try:
            yield server
        finally:
            server.num_in_flight -= 1
            self._account()
            self._wake(1)

    def mark_down(self, server: Server, reason: str) -> None:
        """Send it no requests until a health check passes."""
        self._note(server, ServerEvent.LOST, f"is down: {reason}")

    def mark_behind(self, server: Server, reason: str) -> None:
        """Send it no requests until it got a push."""
        self._note(server, ServerEvent.BEHIND, f"needs a push of the weights: {reason}")

    async def abort_requests(self, timeout_s: float) -> None:
        """Have the servers answer all requests with their present tokens, within timeout_s.

        No request may be sent until `is_aborting` is reset.
        """
        self.is_aborting = True
        self._wake()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(server.num_in_flight for server in self._known.values()):
            await asyncio.gather(*(server.abort_requests(_ABORT_CALL_S) for server in self._known.values()))
            # a request on its way is not known to its server yet
            await asyncio.sleep(_ABORT_INTERVAL_S)

    async def close(self) -> None:
        """End the watches, and close the connections to all servers."""
        watches = [*self._watches.values(), *filter(None, [self._watch])]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for server in self._known.values():
            await server.client.close()

    def _pick(self, avoid: Collection[str], prefer: str | None) -> Server | None:
        self._raise_failure()
        if self.is_aborting:
            raise Aborted
        current = [server for server in self.servers if server.state is ServerState.CURRENT]
        if not current and (behind := self.urls(ServerState.BEHIND)):
            raise NeedsSync(f"no server is at work with weight version {self.version}; push it to: {', '.join(behind)}")
        free = [server for server in current if server.num_in_flight < self._max_concurrency]
        return min(
            free,
            key=lambda server: (server.url in avoid, server.url != prefer, server.num_in_flight),
            default=None,
        )

    def _raise_failure(self) -> None:
        if failure := self._watch_failure or self._failure:
            raise failure

    def _wake(self, num_waiters: int | None = None) -> None:
        """Let the requests that waited longest look again, and wake all waiters for a change.

        num_waiters: number of these requests; None = all.
        """
        self._slots_changed.set()
        self._slots_changed = asyncio.Event()
        while self._waiters and num_waiters != 0:
            waiter = self._waiters.popleft()
            if not waiter.done():  # a cancelled request leaves its waiter behind
                waiter.set_result(None)
                num_waiters = None if num_waiters is None else num_waiters - 1

    def _note(self, server: Server, event: ServerEvent, news: str = "") -> None:
        """Take in an event; log the news if it changes the state."""
        state = server.state.after(event)
        if state is server.state:
            self._account()  # the clock of "all are down" may have been stopped
            return
        if news:
            log.warning("server %s %s", server.url, news)
        self._account()
        server.state = state
        self._account()
        self._wake()

    def _account(self) -> None:
        """Add the present to the means over time, and note since when all servers are down."""
        current = [server for server in self.servers if server.state is ServerState.CURRENT]
        self._capacity.add(len(current))
        num_slots = len(current) * self._max_concurrency
        self._slots_used.add(sum(server.num_in_flight for server in current) / num_slots if num_slots else 0.0)
        there = [server for server in self.servers if server.answers]
        num_without = sum(server.num_in_flight == 0 for server in there)
        self._without_requests.add(num_without / len(there) if there else 0.0)
        if there:
            self._all_down_since = None
        elif self._all_down_since is None:
            self._all_down_since = time.monotonic()

    def _take_list(self, urls: Collection[str]) -> None:
        """Take these URLs for the list. A newly listed server is down until it was asked."""
        before = {server.url for server in self.servers}
        if set(urls) == before:
            return
        for url in urls:
            if url not in self._known:
                self._known[url] = Server(self._connect(url))
            if url not in before:
                self._known[url].state = self._known[url].state.after(ServerEvent.LOST)
        self.servers = [self._known[url] for url in urls]
        if before:
            for words, some in (("new", set(urls) - before), ("no longer listed", before - set(urls))):
                if some:
                    log.warning("servers %s: %s", words, ", ".join(sorted(some)))
        self._account()
        self._wake()

    def _follow(self) -> None:
        """Watch every listed server, and every other with requests."""
        listed = {server.url: server for server in self.servers}
        for url in self._watches.keys() - listed.keys():
            if not self._known[url].num_in_flight:
                self._watches.pop(url).cancel()
        for url in listed.keys() - self._watches.keys():
            self._watches[url] = self._keep_watching(self._watch_one(listed[url]))

    def _keep_watching(self, watch: Coroutine) -> asyncio.Task:
        """Start a background task; if it ends by itself, the run fails."""
        task = asyncio.create_task(watch)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, watch: asyncio.Task) -> None:
        if watch.cancelled():
            return
        error = watch.exception()
        log.error("the servers are watched no more", exc_info=error)
        self._watch_failure = RolloutError(f"the watch over the servers ended with {type(error).__name__}: {error}.")
        self._wake()

    async def _probe(self, urls: Collection[str]) -> None:
        """Ask these servers for health and weight version, all at once."""
        await asyncio.gather(*(self._probe_one(server) for server in self.servers if server.url in urls))

    async def _probe_one(self, server: Server) -> None:
        try:
            version, is_paused = await self._ask(server)
            if is_paused and version == self.version and self._lease is None:
                await self._resume(server)
                is_paused = False
        except ServerError as error:
            # at the start: waiting changes nothing
            if isinstance(error, KeyRefused) and self._watch is None:
                raise UserError(str(error)) from error
            self.mark_down(server, str(error))
            return
        self._classify(server, version, is_paused)

    async def _ask(self, server: Server) -> tuple[int, bool]:
        """Return its weight version, and whether it is paused.

        Raises ServerError if it is not well.
        """
        if server.state is ServerState.ILL:
            await server.client.check_generation(_PROBE_TIMEOUT_S)
            self._note(server, ServerEvent.GENERATED)
        elif server.state is ServerState.DOWN:
            await server.client.check_health(_PROBE_TIMEOUT_S)
        is_paused = await server.client.is_paused(_PROBE_TIMEOUT_S)
        return await server.client.weight_version(_PROBE_TIMEOUT_S), is_paused

    async def _resume(self, server: Server) -> None:
        """Have it take requests again outside a push.

        Raises ServerError if it is ill, not paused.
        """
        log.warning("server %s is paused, or ill: it is told to continue", server.url)
        server.paused_since = None
        try:
            await server.client.resume(_PROBE_TIMEOUT_S)
        except ServerError as error:
            self._note(server, ServerEvent.STUCK, f"is ill: {error}")
            raise

    def _classify(self, server: Server, version: int, is_paused: bool) -> None:
        if self.version is not None and version != self.version:
            self.mark_behind(server, f"it holds version {version}, the trainer {self.version}")
        elif is_paused:  # the push did not reach it to the end: requests would wait there for ever
            self.mark_behind(server, "it is paused: it takes no requests")
        else:
            self._note(server, ServerEvent.READY)

    async def _watch_one(self, server: Server) -> None:
        while True:
            await asyncio.sleep(self._probe_interval_s)
            if (turn := turn_awake(self._lease)) is None:
                server.num_misses = 0
                continue
            await self._look_after(server, turn)
            if turn_awake(self._lease) == turn:
                await self._note_kv_used(server)

    async def _look_after(self, server: Server, turn: int) -> None:
        """Ask for its health and its weights; it may miss a check.

        The requests of a lost or restarted server are lost too. turn: of the lease; in another one
        the answers mean nothing.
        """
        try:
            version, is_paused = await self._ask(server)
            # or a push began between the two questions
            if version == FOREIGN_VERSION and not is_paused:
                version, is_paused = await self._ask(server)
        except ServerError as error:
            if turn_awake(self._lease) != turn:
                return
            server.num_misses += 1
            if server.num_misses == _MISSES:
                self._report_unresponsive({server.url: str(error)})
            if server.num_misses >= _MISSES:
                self.mark_down(server, f"{_MISSES} health checks failed, the last one with {error}")
                server.drop_requests()
            return
        server.num_misses = 0
        # found ill by `expect` since it was asked, or put to sleep
        if server.state is ServerState.ILL or turn_awake(self._lease) != turn:
            return
        if is_paused and self._lease is not None:
            self._classify(server, version, is_paused)
            server.drop_requests()
            return
        is_overdue = server.paused_s(is_paused) >= PAUSE_S + self._push_s
        # a pause or a newer version is a push under way, before `expect` is told of it
        is_newer = self.version is not None and version > self.version
        is_in_push = is_newer or (is_paused and not is_overdue)
        if is_in_push and server.state is not ServerState.DOWN:
            return
        if is_overdue and version == self.version:
            try:
                await self._resume(server)
            except ServerError:
                server.drop_requests()
                return
            is_paused = False
        self._classify(server, version, is_paused)
        if not is_in_push:
            server.drop_requests(version)

    async def _note_kv_used(self, server: Server) -> None:
        """Note the fill of its cache, if it has requests. Other questions tell its health."""
        if server.state is not ServerState.CURRENT or server.num_misses or not server.num_in_flight:
            return
        with suppress(ServerError):
            self._kv_used.add(await server.client.kv_used(_PROBE_TIMEOUT_S))

    async def _watch_all(self) -> None:
        while True:
            await asyncio.sleep(self._probe_interval_s)
            self._take_list(self._listed.read_or_keep())
            self._follow()
            if turn_awake(self._lease) is None:  # the clock of "all are down" stands
                self._all_down_since = None
            since = self._all_down_since
            if since is not None and time.monotonic() - since > self._down_timeout_s:
                self._failure = ServersLost(
                    f"all SGLang servers have been down for {self._down_timeout_s:g} s "
                    f"(actor_rollout_ref.rollout.server.startup_timeout_s): {self._listed}; see their log files."
                )
                self._wake()

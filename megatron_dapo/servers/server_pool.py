"""The servers of a run: who is listed, and what each answers about its health and its weights."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import replace

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import RolloutError, ServersLost, ServersMissing
from megatron_dapo.servers.client import FOREIGN_VERSION, SGLangClient
from megatron_dapo.servers.fleet import LOOK_S, moves, usual_factor
from megatron_dapo.servers.followed_lease import turn_awake
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_error import KeyRefused, ServerError
from megatron_dapo.servers.server_health import ServerEvent, ServerState
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_slots import ServerSlots
from megatron_dapo.storage.lease import LeaseFolder

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0
_MISSES = 3
"""Health checks in a row that a server at work may miss: a busy one is not lost."""

_SILENT_LOOKS = 3
"""Looks in a row between which a server with requests may do nothing."""

PAUSE_S = 30.0
"""How long a server with requests may be paused by others than a push."""


class ServerPool(ServerSlots):
    """The slots of the run's servers, of changing number, and a watch over each server.

    A paused server with the right weights is told to continue: by `expect` at once, with requests
    once no push takes that long.

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
        look_s: float = LOOK_S,
        may_move: bool = True,
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
            look_s: between two looks at the servers' speeds.
            may_move: requests may go on at other servers; else all servers have all seats.
        """
        super().__init__(max_concurrency, keeps_caches, may_move)
        self._listed = listed
        self._connect = connect
        self._report_unresponsive = report_unresponsive
        self._down_timeout_s = down_timeout_s
        self._probe_interval_s = probe_interval_s
        self._push_s = push_s
        self._lease = lease
        self._look_s = look_s
        self._watches: dict[str, asyncio.Task] = {}
        self._watch: asyncio.Task | None = None
        self._speed_watch: asyncio.Task | None = None

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
        self._speed_watch = self._keep_watching(self._watch_speeds())
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

    async def close(self) -> None:
        """End the watches, and close the connections to all servers."""
        watches = [*self._watches.values(), *filter(None, [self._watch, self._speed_watch])]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for server in self._known.values():
            await server.client.close()

    def _take_list(self, urls: Collection[str]) -> None:
        """Take these URLs for the list. A newly listed server is down until it was asked."""
        before = {server.url for server in self.servers}
        if set(urls) == before:
            return
        for url in urls:
            if url not in self._known:
                self._known[url] = Server(self._connect(url), num_seats=self._max_concurrency)
            if url not in before:
                self._note(self._known[url], ServerEvent.LOST)
        self.servers = [self._known[url] for url in urls]
        if before:
            for words, some in (("new", set(urls) - before), ("no longer listed", before - set(urls))):
                if some:
                    log.warning("servers %s: %s", words, ", ".join(sorted(some)))
        self._give_seats()
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
                await self._note_load(server)

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
        server.is_paused = is_paused
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

    async def _note_load(self, server: Server) -> None:
        """Note the fill of its cache and its work, if it has requests. Other questions tell its
        health."""
        if server.state is not ServerState.CURRENT or server.num_misses or not server.num_in_flight:
            return
        with suppress(ServerError):
            load = await server.client.load(_PROBE_TIMEOUT_S)
            self._kv_used.add(load.kv_used)
            self._requests_used.add(load.requests_used)
            server.speedometer.note(load.work)

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

    async def _watch_speeds(self) -> None:
        while True:
            last_look = time.monotonic()
            await asyncio.sleep(self._look_s)
            if turn_awake(self._lease) is not None:
                await self._look_at_speeds(last_look)

    async def _look_at_speeds(self, last_look: float) -> None:
        """Measure the current servers, give them seats by their speed, and move requests.

        Requests of a server given up are moved too, and dropped one look later: only those that it
        does not hand back begin anew.
        """
        for server in self._known.values():
            if server.state is ServerState.ILL:
                server.drop_requests()
        current = self._current()
        usual = usual_factor(server.speedometer.factor for server in current)
        # a push pauses all; SGLang says of an ill server too that it is paused
        is_push = 2 * sum(server.is_paused for server in current) > len(current)
        for server in current:
            has_old_ones = server.has_requests_before(last_look) and not is_push
            server.speedometer.look(usual, has_requests=server.num_in_flight > 0, has_old_ones=has_old_ones)
        self._give_seats()
        silent = [server for server in current if server.speedometer.num_silent >= _SILENT_LOOKS]
        await asyncio.gather(*map(self._give_up, silent))
        await self._move_requests()

    async def _give_up(self, server: Server) -> None:
        """Give up a silent server that generates nothing when asked, if it is in no push.

        Silence also comes from a long prompt, a compilation or a pause.
        """
        server.speedometer.num_silent = 0
        turn = turn_awake(self._lease)
        try:
            if not await server.client.is_paused(_PROBE_TIMEOUT_S):
                await server.client.check_generation(_PROBE_TIMEOUT_S)
            elif self._lease is None and server.paused_s(is_paused=True) >= self._push_s:
                if await server.client.weight_version(_PROBE_TIMEOUT_S) == self.version:
                    await self._resume(server)
            return
        except ServerError as error:
            if turn_awake(self._lease) != turn:
                return
            why = f"it has written nothing for {_SILENT_LOOKS * self._look_s:g} s: {error}"
        self._report_unresponsive({server.url: why})
        self._note(server, ServerEvent.STUCK, f"is ill: {why}")
        if self._may_move:
            await server.move_requests(None, _PROBE_TIMEOUT_S)
        else:
            server.drop_requests()

    async def _move_requests(self) -> None:
        current = self._current()
        if not self._may_move:
            return
        under_way = [pair for server in current for pair in server.requests_under_way()]
        order = {uid: number for number, uid in enumerate(sorted({uid for uid, _ in under_way}))}
        requests = [replace(request, group=order[uid]) for uid, request in under_way]
        names: dict[str, set[str]] = defaultdict(set)
        for move in moves([server.load for server in current], requests, self.is_blocked()):
            names[move.source].add(move.request)
        # a failed question or abort moves nothing
        asked = (server.move_requests(names[server.url], _PROBE_TIMEOUT_S) for server in current if server.url in names)
        await asyncio.gather(*asked, return_exceptions=True)

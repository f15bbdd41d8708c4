"""The servers of a run with their slots; a request goes to the one that answers soonest."""

import asyncio
import heapq
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from megatron_dapo.common.rollout_errors import Aborted, NeedsSync, RolloutError
from megatron_dapo.servers.fleet import pick, seats, usual_factor
from megatron_dapo.servers.running_means import MeanAndMax, MeanOverTime
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_health import ServerEvent, ServerState
from megatron_dapo.servers.speedometer import Speedometer

log = logging.getLogger(__name__)

_ABORT_INTERVAL_S = 0.1
# for one call: after an answer a server is asked again, without waiting for the slow ones
_ABORT_CALL_S = 0.5

_NOISE = 0.1
"""Difference of two equal servers' measured factors. Such ones count as equal."""


class ServerSlots:
    """The servers, their states (`server_health.py`) and the requests that hold their slots.

    Only current servers get requests. A server in the state BEHIND finishes the requests that still
    accept its version.
    """

    def __init__(self, max_concurrency: int, keeps_caches: bool = False, may_move: bool = True) -> None:
        """Begin without servers.

        Args:
            max_concurrency: requests in flight per server.
            keeps_caches: a push leaves the prefixes read by older weights in the servers' caches.
            may_move: requests may go on at other servers; else all servers have all seats.
        """
        self.servers: list[Server] = []
        self.version: int | None = None
        self.is_aborting = False
        self.is_blocked: Callable[[], bool] = lambda: False  # slow requests hold up the run
        # of the looks since `take_speeds`
        self._factor_max = 1.0
        self._num_slow = 0  # most servers at once without a seat
        # all servers ever listed: their clients are closed in the end
        self._known: dict[str, Server] = {}
        self._max_concurrency = max_concurrency
        self._may_move = may_move
        self._all_down_since: float | None = None
        self._failure: RolloutError | None = None
        self._watch_failure: RolloutError | None = None
        # a server outlives a run: prefixes read by other runs at the same version, by other
        # weights, are not this run's
        self._salt = uuid.uuid4().hex if keeps_caches else None
        # a heap: who comes first has the least place, which stays while it looks in vain
        self._waiters: list[tuple[tuple[bool, int], asyncio.Future]] = []
        self._places = itertools.count()
        self._num_waiting = 0  # requests waiting for a slot, also those just woken
        self._slots_changed = asyncio.Event()  # the next time
        self._capacity = MeanOverTime()
        self._slots_used = MeanOverTime()
        self._without_requests = MeanOverTime()
        self._kv_used = MeanAndMax()
        self._requests_used = MeanAndMax()

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

    def take_room_used(self) -> dict[str, float]:
        """Return the metrics of the servers' room in use, over the looks since the last call.

        Only servers with requests are looked at. Empty without a look.
        """
        names = ("rollout/kv_used_mean", "rollout/kv_used_max")
        metrics = dict(zip(names, self._kv_used.take() or (), strict=False))
        names = ("rollout/requests_used_mean", "rollout/requests_used_max")
        return metrics | dict(zip(names, self._requests_used.take() or (), strict=False))

    def take_speeds(self) -> dict[str, float]:
        """Return the metrics of the servers' speeds since the last call."""
        metrics = {
            "rollout/server_factor_max": self._factor_max,
            "rollout/servers_slow": self._num_slow,
        }
        self._factor_max, self._num_slow = 1.0, 0
        self._note_speeds()
        for server in self.servers if len(self.servers) > 1 else ():
            name = server.url.partition("://")[2]
            metrics |= {f"rollout/factor/{name}": server.factor, f"rollout/seats/{name}": server.num_seats}
        return metrics

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
        free = sum(max(server.num_seats - server.num_in_flight, 0) for server in self._current())
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
    async def slot(
        self, avoid: Collection[str] = (), prefer: str | None = None, is_first: bool = False
    ) -> AsyncIterator[Server]:
        """Hold a slot of a current server; wait while all are full or down.

        avoid: servers to take only if no other is free.
        prefer: the server with the text's prefix in its cache, unless it is slow; else the one that
            writes soonest.
        is_first: before all waiting requests but such ones.

        Raises NeedsSync if all answering servers are behind, RolloutError if all have been down for
        down_timeout_s, Aborted while requests are aborted.
        """
        self._num_waiting += 1
        place = (not is_first, next(self._places))
        try:
            while (server := self._pick(avoid, prefer)) is None:
                waiter = asyncio.get_running_loop().create_future()
                heapq.heappush(self._waiters, (place, waiter))
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
            self._wake(int(server.num_in_flight < server.num_seats))

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

    def _current(self) -> list[Server]:
        return [server for server in self.servers if server.state is ServerState.CURRENT]

    def _pick(self, avoid: Collection[str], prefer: str | None) -> Server | None:
        self._raise_failure()
        if self.is_aborting:
            raise Aborted
        current = self._current()
        if not current and (behind := self.urls(ServerState.BEHIND)):
            raise NeedsSync(f"no server is at work with weight version {self.version}; push it to: {', '.join(behind)}")
        by_url = {server.url: server for server in current}
        if prefer in by_url and by_url[prefer].num_seats < self._max_concurrency:
            prefer = None
        url = pick((server.load for server in current), avoid=avoid, prefer=prefer)
        return by_url[url] if url else None

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
            _, waiter = heapq.heappop(self._waiters)
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
        if state is ServerState.DOWN:  # it may come back as another process, or on another machine
            server.speedometer = Speedometer()
        self._give_seats()
        self._wake()

    def _account(self) -> None:
        """Add the present to the means over time, and note since when all servers are down."""
        current = self._current()
        self._capacity.add(len(current))
        num_slots = sum(max(server.num_seats, server.num_in_flight) for server in current)
        self._slots_used.add(sum(server.num_in_flight for server in current) / num_slots if num_slots else 0.0)
        there = [server for server in self.servers if server.answers]
        num_without = sum(server.num_in_flight == 0 for server in there)
        self._without_requests.add(num_without / len(there) if there else 0.0)
        if there:
            self._all_down_since = None
        elif self._all_down_since is None:
            self._all_down_since = time.monotonic()

    def _give_seats(self) -> None:
        """Give the current servers seats by their measured speeds."""
        current = self._current()
        factors = {server.url: server.speedometer.factor if self._may_move else None for server in current}
        granted = seats(factors, self._max_concurrency)
        usual = usual_factor(server.speedometer.factor for server in current)
        grew = False
        for server in current:
            factor = server.speedometer.factor
            ratio = factor / usual if factor and usual else 1.0
            server.factor = 1.0 if abs(ratio - 1.0) <= _NOISE else ratio
            if server.num_seats > granted[server.url] == 0:
                log.warning("server %s takes %.1f times as long for a token: it gets no requests", server.url, ratio)
            grew |= server.num_seats < granted[server.url]
            server.num_seats = granted[server.url]
        self._note_speeds()
        self._account()
        if grew:
            self._wake()

    def _note_speeds(self) -> None:
        """Take the present into the maxima."""
        current = self._current()
        self._factor_max = max([self._factor_max, *(server.factor for server in current)])
        self._num_slow = max(self._num_slow, sum(not server.num_seats for server in current))

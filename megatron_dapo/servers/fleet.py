"""Rules for servers of unequal speed: seats by speed, pick by time per token, move what blocks.

Pure: no clock, no servers. The run's servers and the plan's simulation call the same functions: in
a look in `LOOK_S` for factors, seats and moves, at each request for `pick`.

A server's **factor** is its seconds per token over those of a usual server with as many requests;
only ratios matter. Its **seats** are the requests that it may hold.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

LOOK_S = 10.0
"""Seconds between two looks at a server's speed."""

_SLOWEST = 2.0  # a token on a seat, relative to one on a full usual server
_NEW = 0.5  # weight of a measurement in the factor
_IDLE = 0.1  # part of the way back to usual, per look without requests: it is tried again
_MAX_MOVES = 32  # in a look
_REST_S = 60.0  # between two moves of one request
_OLDEST_GROUPS = 64  # whose requests may block
_GAIN = 1.5  # of a moved request's tokens
_MAX_READ = 22_500  # tokens of moved text for one server in a look: 1.5 s at 15,000 a second


@dataclass(frozen=True)
class TokenTime:
    """Seconds of a token on a server of factor 1, by its requests; their unit does not matter."""

    base: float  # without requests: reading the weights
    per_request: float  # more for each request: reading its cache

    def token_s(self, factor: float, num_requests: int) -> float:
        """Return the seconds of one token of each request."""
        return factor * (self.base + self.per_request * num_requests)

    def factor(self, num_requests: int, tokens_per_s: float) -> float:
        """Return the factor of a server that writes so many tokens a second in all."""
        return num_requests / tokens_per_s / self.token_s(1.0, num_requests)


# By the plan for a 32B model at TP 4. An error of the ratio changes factors, seats, picks and moves
# of unequal servers; docs/rollout.md has a row with twice the ratio.
TOKEN_TIME = TokenTime(66.0, 1.0)


@dataclass(frozen=True)
class ServerLoad:
    """A current server at one moment."""

    name: str  # URL or number
    factor: float
    num_requests: int
    num_seats: int


@dataclass(frozen=True)
class RequestUnderWay:
    """A request at a server."""

    name: str
    server: str
    group: int  # number of its draw: the least is the oldest
    num_tokens: int  # prompt and answer so far: another server reads them again
    moved_s: float = math.inf  # since its last move


@dataclass(frozen=True)
class Move:
    """A request to abort and to continue elsewhere with all its tokens."""

    request: str
    source: str
    target: str | None  # None: no seat is free, it is the first in line


def usual_factor(factors: Iterable[float | None]) -> float | None:
    """Return the lower median: of two the faster is usual. None if none is measured."""
    measured = [factor for factor in factors if factor is not None]
    return median_low(measured) if measured else None


def next_factor(factor: float | None, measured: float | None, usual: float | None) -> float | None:
    """Return a server's factor after a look.

    factor: before; None = never measured, and taken for usual. measured: None = it had no requests.
    usual: `usual_factor` of all current servers.
    """
    before = usual if factor is None else factor
    if measured is not None:
        return measured if before is None else before + _NEW * (measured - before)
    return factor if factor is None or usual is None else factor + _IDLE * (usual - factor)


def seats(factors: Mapping[str, float | None], most: int, time: TokenTime = TOKEN_TIME) -> dict[str, int]:
    """Return the seats of each server; 0 = it is drained.

    On each granted seat a token takes at most twice as long as on a full usual server. So servers
    up to twice as slow have all `most` seats, and one server at least has them.
    """
    usual = usual_factor(factors.values())
    if usual is None:
        return dict.fromkeys(factors, most)
    longest = _SLOWEST * time.token_s(usual, most)

    def of(factor: float | None) -> int:
        if factor is None or factor <= _SLOWEST * usual:
            return most
        return min(max(math.floor((longest / factor - time.base) / time.per_request), 0), most)

    return {name: of(factor) for name, factor in factors.items()}


def pick(
    servers: Iterable[ServerLoad], time: TokenTime = TOKEN_TIME, avoid: Collection[str] = (), prefer: str | None = None
) -> str | None:
    """Return the server that writes one more request's tokens soonest; None without a free seat.

    With equal factors it is the one with the fewest requests. avoid: taken only if no other is
    free. prefer: taken if it is free.
    """
    free = [server for server in servers if server.num_requests < server.num_seats]

    def order(server: ServerLoad) -> tuple[bool, bool, float]:
        token_s = time.token_s(server.factor, server.num_requests + 1)
        return server.name in avoid, server.name != prefer, token_s

    return min(free, key=order).name if free else None


def moves(
    servers: Sequence[ServerLoad], requests: Iterable[RequestUnderWay], blocked: bool, time: TokenTime = TOKEN_TIME
) -> list[Move]:
    """Return the requests to move in this look, oldest first; not to be asked during a push.

    Requests leave a server with more than 1.25 seats + 2 until its seats are enough, and a drained
    one at once. While the run is blocked (a seat is free, and only `max_staleness` keeps it so), so
    do those of the oldest groups whose tokens take 1.5 times as long here as on a free seat.

    Whether to move depends on time and on the tokens so far, never on the next one. It is a
    stopping time, and the next token has the same distribution elsewhere: answers have no bias.
    """
    plan = _Plan({server.name: server for server in servers}, time)
    overfull = {load.name for load in servers if load.num_requests > (1.25 * load.num_seats + 2) * (load.num_seats > 0)}
    if not (blocked or overfull):
        return []
    oldest = sorted(requests, key=lambda request: (request.group, request.name))
    rested = [request for request in oldest if request.moved_s >= _REST_S and request.server in plan.loads]
    for request in rested:
        load = plan.loads[request.server]
        if load.name in overfull and load.num_requests > load.num_seats:
            plan.move(request)
    blocking = set(sorted({request.group for request in oldest})[:_OLDEST_GROUPS]) if blocked else set()
    moved = {move.request for move in plan.made}
    for request in rested:
        if request.group in blocking and request.name not in moved:
            plan.move(request, gain=_GAIN)
    return plan.made


@dataclass
class _Plan:
    """The moves so far, and the servers after them."""

    loads: dict[str, ServerLoad]
    time: TokenTime
    made: list[Move] = field(default_factory=list)
    num_read: Counter[str] = field(default_factory=Counter)  # server -> tokens of moved text

    def move(self, request: RequestUnderWay, gain: float = 0.0) -> None:
        """Move the request if a server may take it.

        gain: how many times as long its tokens take here as there; 0: it leaves without a free
        seat, too.
        """
        source = self.loads[request.server]
        others = [load for load in self.loads.values() if load is not source]
        free = [load for load in others if load.num_requests < load.num_seats]
        name = pick((load for load in free if self.num_read[load.name] <= _MAX_READ), self.time)
        if len(self.made) == _MAX_MOVES or not others or (name is None and (free or gain)):
            return
        if name is not None:
            target = self.loads[name]
            there = self.time.token_s(target.factor, target.num_requests + 1)
            if self.time.token_s(source.factor, source.num_requests) <= gain * there:
                return
            self.loads[name] = replace(target, num_requests=target.num_requests + 1)
            self.num_read[name] += request.num_tokens
        self.loads[source.name] = replace(source, num_requests=source.num_requests - 1)
        self.made.append(Move(request.name, source.name, name))


def restart_bias_bound(losses_per_s: float, token_s: float, mean: float, mean_square: float) -> float:
    """Return by which share responses are shorter at most, as lost ones begin anew.

    losses_per_s: restarts over the seconds of all requests. token_s: of a token. mean, mean_square:
    of a response's tokens L.

    A response ends without a loss with the probability exp(-losses_per_s token_s L). The derivative
    of the mean by that rate is -Var(L), which falls for lengths with a long tail.
    """
    return losses_per_s * token_s * (mean_square - mean**2) / mean

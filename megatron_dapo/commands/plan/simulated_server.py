"""One simulated server: its requests, and its speed, which may change."""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_dapo.servers.fleet import TOKEN_TIME, ServerLoad, TokenTime

_READ_TOKENS_PER_S = 15_000.0  # of a moved request's text; the server writes nothing meanwhile


@dataclass(frozen=True)
class SpeedChange:
    """A server's speed from a moment on."""

    at_s: float
    server: int
    # seconds of a token over those of `Machines`. Infinite: it answers and writes nothing. None: it
    # is lost with its requests.
    factor: float | None


@dataclass(frozen=True)
class Machines:
    """The servers and the trainer, in seconds.

    A server with r requests in flight writes one token of each in token_s + r *
    token_s_per_request.
    """

    num_servers: int
    slots_per_server: int
    token_s: float
    train_s: float
    """From a batch to the push."""
    push_s: float
    """Of the weights, while no server writes."""
    token_s_per_request: float = 0.0
    changes: tuple[SpeedChange, ...] = ()
    """In the order of time. With any, servers are looked at as in a run; all begin with factor
    1."""
    assumed: TokenTime = TOKEN_TIME
    """By the rules for seats, picks and moves."""

    @property
    def num_slots(self) -> int:
        """Return the total number of requests that the servers take."""
        return self.num_servers * self.slots_per_server


@dataclass(frozen=True)
class SimulatedRequest:
    """One requested response. Requests that end at the same time are ordered by their number."""

    number: int
    uid: str  # the group's
    length: int
    is_correct: bool
    draw: int = 0  # number of the group's draw
    position: int = 0  # in the group
    attempt: int = 0  # moves and restarts so far
    moved_at: float = -math.inf  # seconds of the run
    earlier: Mapping[int, int] = field(default_factory=dict)  # version -> tokens, by servers before

    @property
    def num_earlier(self) -> int:
        """Return the number of its tokens that it brought along."""
        return sum(self.earlier.values())

    def __lt__(self, other: "SimulatedRequest") -> bool:
        return self.number < other.number


class SimulatedServer:
    """Requests in flight on one server.

    All advance at the same rate, so that one counter of tokens written orders their ends.
    """

    def __init__(self, machines: Machines, number: int = 0) -> None:
        self.name = str(number)
        self.is_down = False  # known to be: it gets no requests
        self.factor = 1.0  # of its seconds per token
        self.measured: float | None = None
        self.num_silent_looks = 0  # in a row
        self.load = ServerLoad(self.name, 1.0, 0, machines.slots_per_server)
        self._machines = machines
        self._written = 0.0  # tokens that a request would have that began first of all
        self._reading_s = 0.0  # until it writes again
        self._running: list[tuple[float, SimulatedRequest]] = []  # (written at its end, request)
        self._written_before = [0.0]  # version -> written when it was pushed
        self.update()

    def update(self) -> None:
        """Take in a change of requests or factor; what depends on them is read more often."""
        number = len(self._running)
        self._seconds_per_token = self.factor * (self._machines.token_s + number * self._machines.token_s_per_request)
        self.load = replace(self.load, num_requests=number)

    @property
    def is_silent(self) -> bool:
        """Return whether it has requests and writes nothing."""
        return bool(self._running) and math.isinf(self.factor)

    def progress(self) -> list[tuple[SimulatedRequest, int]]:
        """Return the requests in flight, each with its number of tokens so far."""
        return [(request, self._num_tokens(request, end)) for end, request in self._running]

    def _num_tokens(self, request: SimulatedRequest, end: float) -> int:
        return request.length - max(math.ceil(end - self._written), 1)

    def seconds_to_next_end(self) -> float:
        """Return the seconds until the next request is done; infinite without one."""
        if not self._running or math.isinf(self.factor):
            return math.inf
        return self._reading_s + max(self._running[0][0] - self._written, 0.0) * self._seconds_per_token

    def add(self, request: SimulatedRequest) -> None:
        """Begin a request, or continue a moved one after reading its text."""
        self._reading_s += request.num_earlier / _READ_TOKENS_PER_S
        heapq.heappush(self._running, (self._written + request.length - request.num_earlier, request))
        self.update()

    def push(self) -> None:
        """Write with weights of the next version from now on."""
        self._written_before.append(self._written)

    def advance(self, seconds: float) -> None:
        """Write tokens for so many seconds, at most `seconds_to_next_end`."""
        reading_s = min(seconds, self._reading_s)
        self._reading_s -= reading_s
        self._written += (seconds - reading_s) / self._seconds_per_token

    def pop(self) -> tuple[SimulatedRequest, dict[int, int]]:
        """End the next request; return it with the number of its tokens by weight version."""
        self._written, request = heapq.heappop(self._running)
        self.update()
        return request, self._tokens_of(request, self._written, request.length)

    def abort(self, request: SimulatedRequest) -> dict[int, int]:
        """End a request; return its tokens so far by weight version."""
        (end,) = [end for end, each in self._running if each is request]
        self._running.remove((end, request))
        heapq.heapify(self._running)
        self.update()
        return self._tokens_of(request, end, self._num_tokens(request, end))

    def _tokens_of(self, request: SimulatedRequest, end: float, number: int) -> dict[int, int]:
        """Return the first tokens of a request by weight version. end: `_written` at its end."""
        began = end - (request.length - request.num_earlier)
        num_tokens: Counter[int] = Counter(request.earlier)
        num_left = max(number - request.num_earlier, 0)
        for version in range(len(self._written_before) - 1, -1, -1):
            num_before = max(round(self._written_before[version] - began), 0)
            if num_left > num_before:
                num_tokens[version] += num_left - num_before
                num_left = num_before
            if not num_left:
                break
        return dict(sorted(num_tokens.items()))

"""The simulated servers together: their requests by the rules of a run (`servers/fleet.py`)."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from megatron_dapo.commands.plan.simulated_server import Machines, SimulatedRequest, SimulatedServer
from megatron_dapo.servers import fleet

_NOISE = 0.05  # deviation of a measured factor
_SILENT_LOOKS = 3  # in a row: 30 s, as in a run


class SimulatedFleet:
    """Servers with their seats, and the requests that wait for one.

    With `Machines.changes` a look in `LOOK_S` measures them, moves requests, and gives up servers
    that write nothing. Otherwise all are equal, and a look would decide nothing.
    """

    def __init__(self, machines: Machines, length_anew: Callable[[SimulatedRequest], int]) -> None:
        """Prepare servers without requests.

        length_anew: the length of a request that goes on elsewhere, given its earlier tokens.
        """
        self.servers = [SimulatedServer(machines, number) for number in range(machines.num_servers)]
        self.waiting: deque[SimulatedRequest] = deque()  # without a seat
        # looks | blocked looks | slow: servers without a seat, over the looks | moves | restarts
        self.counts: Counter[str] = Counter()
        self.largest_factor = 1.0  # over the usual one
        self._most = machines.slots_per_server
        self._time = machines.assumed
        self._length_anew = length_anew
        self._changes = deque(machines.changes)
        self._next_look = fleet.LOOK_S if machines.changes else math.inf
        self._noise = random.Random(0)

    @property
    def num_in_flight(self) -> int:
        """Return the number of requests at servers."""
        return sum(server.load.num_requests for server in self.servers)

    @property
    def next_event(self) -> float:
        """Return the time of the next look or change of speed; infinite without one.

        Looks bring no lost server back: without any at work they are no events.
        """
        next_change = self._changes[0].at_s if self._changes else math.inf
        has_server = any(not server.is_down for server in self.servers)
        return min(self._next_look, next_change) if has_server else next_change

    def change(self, now: float) -> bool:
        """Take in the changes of speed until now; return whether to look at the servers."""
        while self._changes and self._changes[0].at_s <= now:
            change = self._changes.popleft()
            server = self.servers[change.server]
            server.factor = math.inf if change.factor is None else change.factor
            server.update()
            server.is_down = change.factor is None
            if server.is_down:
                self.drop(server)
        is_due = self._next_look <= now
        self._next_look += fleet.LOOK_S * (1 + (now - self._next_look) // fleet.LOOK_S) if is_due else 0
        return is_due

    def has_free_seat(self) -> bool:
        """Return whether a seat is free for which no request waits."""
        loads = (server.load for server in self.servers if not server.is_down)
        return sum(max(load.num_seats - load.num_requests, 0) for load in loads) > len(self.waiting)

    def fill_seats(self) -> None:
        """Give free seats to the requests that wait longest."""
        while self.waiting:
            name = fleet.pick((server.load for server in self.servers if not server.is_down), self._time)
            if name is None:
                return
            self.servers[int(name)].add(self.waiting.popleft())

    def look(self, now: float, is_blocked: bool) -> None:
        """Measure the servers, grant seats, and move requests."""
        for server in self.servers:
            server.num_silent_looks = server.num_silent_looks + 1 if server.is_silent else 0
            if server.num_silent_looks == _SILENT_LOOKS:
                server.is_down = True
                self.drop(server)
        current = [server for server in self.servers if not server.is_down]
        usual = fleet.usual_factor(server.measured for server in current)
        for server in current:
            is_writing = server.load.num_requests and not server.is_silent
            measured = server.factor * self._noise.lognormvariate(0, _NOISE) if is_writing else None
            server.measured = fleet.next_factor(server.measured, measured, usual)
        self._grant_seats(current)
        self._move(now, [server.load for server in current], is_blocked)
        self.counts.update({"looks": 1, "blocked looks": is_blocked})

    def drop(self, server: SimulatedServer) -> None:
        """Have a server's requests begin anew elsewhere."""
        server.measured = None
        lost = sorted(request for request, _ in server.progress())
        for request in lost:
            server.abort(request)
        self.counts["restarts"] += len(lost)
        self.waiting.extendleft(self._continued(request, {}) for request in reversed(lost))

    def _grant_seats(self, current: list[SimulatedServer]) -> None:
        factors = {server.name: server.measured for server in current}
        usual = fleet.usual_factor(factors.values()) or 1.0
        num_seats = fleet.seats(factors, self._most, self._time)
        for server in current:
            factor = server.measured or usual
            server.load = replace(server.load, factor=factor, num_seats=num_seats[server.name])
            self.counts["slow"] += not num_seats[server.name]
            self.largest_factor = max(self.largest_factor, factor / usual)

    def _move(self, now: float, loads: list[fleet.ServerLoad], is_blocked: bool) -> None:
        first_in_line = []
        for move in fleet.moves(loads, self._under_way(now), is_blocked, self._time):
            source = self.servers[int(move.source)]
            (request,) = [request for request, _ in source.progress() if str(request.number) == move.request]
            request = self._continued(replace(request, moved_at=now), source.abort(request))
            self.counts["moves"] += 1
            if move.target is None:
                first_in_line.append(request)
            else:
                self.servers[int(move.target)].add(request)
        self.waiting.extendleft(reversed(first_in_line))

    def _under_way(self, now: float) -> Iterable[fleet.RequestUnderWay]:
        for server in self.servers:
            for each, num_tokens in server.progress():
                since = now - each.moved_at
                yield fleet.RequestUnderWay(str(each.number), server.name, each.draw, num_tokens, since)

    def _continued(self, request: SimulatedRequest, num_tokens: Mapping[int, int]) -> SimulatedRequest:
        """Return a request with these of its tokens, to go on elsewhere."""
        request = replace(request, attempt=request.attempt + 1, earlier=num_tokens)
        return replace(request, length=self._length_anew(request))

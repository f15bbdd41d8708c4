"""One server of a run: its state, its speed and its requests."""

import asyncio
import math
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from megatron_dapo.data.token_arrays import TokenIds
from megatron_dapo.servers.client import ExpertQuestion, Generation, SamplingParams, SGLangClient
from megatron_dapo.servers.fleet import RequestUnderWay, ServerLoad
from megatron_dapo.servers.growing_answer import GrowingAnswer
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.server_health import ServerState
from megatron_dapo.servers.speedometer import Speedometer

_GIVE_UP_S = 2.0  # to end a request for which nobody waits, and as long again for its answer


@dataclass(frozen=True)
class Request:
    """A request under way."""

    asking: asyncio.Task
    oldest_allowed: int  # oldest weight version that may write the answer
    answer: GrowingAnswer
    num_read: int  # tokens of its text
    num_steps: float  # of the server before it
    began: float  # on the monotonic clock


@dataclass
class Server:
    """One server as the controller knows it."""

    client: SGLangClient
    state: ServerState = ServerState.DOWN
    num_in_flight: int = 0  # requests that hold a slot
    num_misses: int = 0  # failed health checks in a row
    is_paused: bool = False  # or ill, by the last health check
    paused_since: float | None = None  # first seen paused with its present requests
    num_seats: int = 0  # requests that it may hold, by its speed
    factor: float = 1.0  # seconds per token over the usual server's
    speedometer: Speedometer = field(default_factory=Speedometer)
    _requests: dict[str, Request] = field(default_factory=dict)  # by their ids

    @property
    def url(self) -> str:
        """Return the server's URL, which names it."""
        return self.client.url

    @property
    def answers(self) -> bool:
        """Return whether requests or a push can reach it."""
        return self.state in (ServerState.BEHIND, ServerState.CURRENT)

    @property
    def load(self) -> ServerLoad:
        """Return its load at this moment."""
        return ServerLoad(self.url, self.factor, self.num_in_flight, self.num_seats)

    def paused_s(self, is_paused: bool) -> float:
        """Return the seconds for which it has been paused under requests. is_paused: seen now."""
        if not (is_paused and self.num_in_flight > 0):
            self.paused_since = None
            return 0.0
        now = time.monotonic()
        self.paused_since = now if self.paused_since is None else self.paused_since
        return now - self.paused_since

    async def generate(
        self,
        tokens: TokenIds,
        params: SamplingParams,
        timeout_s: float,
        oldest_allowed: int,
        cache_salt: str | None = None,
        experts: ExpertQuestion | None = None,
        answer: GrowingAnswer | None = None,
    ) -> Generation:
        """Return the next part of the answer, mostly all of it.

        Raises ServerError at once if the server is lost meanwhile, or found to hold weights older
        than oldest_allowed.
        """
        request_id = uuid.uuid4().hex
        asking = asyncio.create_task(self.client.generate(tokens, params, timeout_s, request_id, cache_salt, experts))
        self._requests[request_id] = Request(
            asking, oldest_allowed, answer or GrowingAnswer(), len(tokens), self._num_steps, time.monotonic()
        )
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise ServerError(self.url, "/generate", None, "the server was lost")
            return asking.result()
        except asyncio.CancelledError:
            if answer is not None:
                answer.num_given_up = await self._give_up(request_id, asking)
            raise
        finally:
            del self._requests[request_id]
            asking.cancel()

    async def _give_up(self, request_id: str, asking: "asyncio.Task[Generation]") -> int:
        """End a request for which nobody waits; return its number of tokens.

        0 if the server is paused, or does not answer. A closed connection it would notice seconds
        later only.
        """
        await self._abort([request_id], _GIVE_UP_S)
        await asyncio.wait({asking}, timeout=_GIVE_UP_S)
        has_answer = asking.done() and not asking.cancelled() and asking.exception() is None
        return len(asking.result().tokens) if has_answer else 0

    @property
    def _num_steps(self) -> float:
        return self.speedometer.work.num_steps if self.speedometer.work else 0.0

    def requests_under_way(self) -> Iterator[tuple[str, RequestUnderWay]]:
        """Yield (uid of its group, request) for each; all of group 0.

        Every step writes a token of each request.
        """
        now = time.monotonic()
        for name, request in self._requests.items():
            num_tokens = request.num_read + max(round(self._num_steps - request.num_steps), 0)
            moved_at = request.answer.moved_at
            moved_s = math.inf if moved_at is None else now - moved_at
            yield request.answer.group, RequestUnderWay(name, self.url, 0, num_tokens, moved_s)

    def has_requests_before(self, moment: float) -> bool:
        """Return whether a request began before this moment of the monotonic clock."""
        return any(request.began < moment for request in self._requests.values())

    async def move_requests(self, names: Collection[str] | None, timeout_s: float) -> None:
        """Have requests go on elsewhere with their present tokens. names: None = all.

        None of a paused server: it would answer without tokens.
        """
        if names is not None and await self.client.is_paused(timeout_s):
            return
        moving = [name for name in self._requests if names is None or name in names]
        for name in moving:
            answer = self._requests[name].answer
            answer.is_moving, answer.moved_at = True, time.monotonic()  # it rests even if it stays
        await self._abort(moving, timeout_s)

    async def abort_requests(self, timeout_s: float) -> None:
        """Have the server answer all requests with their present tokens.

        A request goes on if the server does not hear of this.
        """
        await self._abort(list(self._requests), timeout_s)

    async def _abort(self, names: Collection[str], timeout_s: float) -> None:
        await asyncio.gather(*(self.client.abort(name, timeout_s) for name in names), return_exceptions=True)

    def drop_requests(self, writes: int | None = None) -> None:
        """End all requests with a ServerError.

        writes: end only requests that accept no tokens of this weight version.
        """
        for request in self._requests.values():
            if writes is None or writes < request.oldest_allowed:
                request.asking.cancel()

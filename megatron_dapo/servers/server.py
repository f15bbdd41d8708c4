"""One server of a run: what is known of it, and the requests that it has."""

import asyncio
import uuid
from dataclasses import dataclass, field
from enum import Enum

from megatron_dapo.data.token_arrays import TokenIds
from megatron_dapo.servers.client import ExpertQuestion, Generation, SamplingParams, ServerError, SGLangClient


class ServerState(Enum):
    """What a server is good for now."""

    DOWN = "down"  # does not answer
    STALE = "stale"  # answers, but needs a push: it holds other weights than the trainer's, or was left paused by one
    CURRENT = "current"


@dataclass(frozen=True)
class Request:
    """A request under way. oldest_allowed: the oldest weight version that may write its answer."""

    answer: asyncio.Task
    oldest_allowed: int


@dataclass
class Server:
    """One server, and what is known of it.

    num_in_flight: requests that hold a slot. num_misses: health checks that failed in a row. paused_since: when it was
    first seen paused with the requests that it has. is_ill: it takes no requests though it is not paused.
    """

    client: SGLangClient
    state: ServerState = ServerState.DOWN
    num_in_flight: int = 0
    num_misses: int = 0
    paused_since: float | None = None
    is_ill: bool = False
    _requests: dict[str, Request] = field(default_factory=dict)  # by their ids

    @property
    def url(self) -> str:
        """Return the server's URL, which names it."""
        return self.client.url

    async def generate(
        self,
        tokens: TokenIds,
        params: SamplingParams,
        timeout_s: float,
        oldest_allowed: int,
        cache_salt: str | None = None,
        experts: ExpertQuestion | None = None,
    ) -> Generation:
        """Return the client's answer; raise ServerError at once where the server is found to be lost meanwhile, or to
        hold weights older than the oldest allowed version."""
        request_id = uuid.uuid4().hex
        asking = self.client.generate(tokens, params, timeout_s, request_id, cache_salt, experts)
        answer = asyncio.create_task(asking)
        self._requests[request_id] = Request(answer, oldest_allowed)
        try:
            await asyncio.wait({answer})
            if answer.cancelled():
                raise ServerError(self.url, "/generate", None, "the server was lost")
            return answer.result()
        finally:
            del self._requests[request_id]
            answer.cancel()

    async def abort_requests(self, timeout_s: float) -> None:
        """Ask for the answers to what is in flight, as far as they got. What cannot be asked for stays in flight."""
        calls = (self.client.abort(request_id, timeout_s) for request_id in list(self._requests))
        await asyncio.gather(*calls, return_exceptions=True)

    def drop_requests(self, writes: int | None = None) -> None:
        """End what is in flight, with a ServerError; where it is known by which weight version the server writes, only
        what that one may not write."""
        for request in self._requests.values():
            if writes is None or writes < request.oldest_allowed:
                request.answer.cancel()

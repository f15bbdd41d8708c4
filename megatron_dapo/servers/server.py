"""One server of a run: its state and its requests."""

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from megatron_dapo.data.token_arrays import TokenIds
from megatron_dapo.servers.client import ExpertQuestion, Generation, SamplingParams, SGLangClient
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.server_health import ServerState


@dataclass(frozen=True)
class Request:
    """A request under way."""

    answer: asyncio.Task
    oldest_allowed: int  # oldest weight version that may write the answer


@dataclass
class Server:
    """One server as the controller knows it."""

    client: SGLangClient
    state: ServerState = ServerState.DOWN
    num_in_flight: int = 0  # requests that hold a slot
    num_misses: int = 0  # failed health checks in a row
    paused_since: float | None = None  # first seen paused with its present requests
    _requests: dict[str, Request] = field(default_factory=dict)  # by their ids

    @property
    def url(self) -> str:
        """Return the server's URL, which names it."""
        return self.client.url

    @property
    def answers(self) -> bool:
        """Return whether requests or a push can reach it."""
        return self.state in (ServerState.BEHIND, ServerState.CURRENT)

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
    ) -> Generation:
        """Return the client's answer.

        Raises ServerError at once if the server is lost meanwhile, or found to hold weights older
        than oldest_allowed.
        """
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
        """Have the server answer all requests with their present tokens.

        A request goes on if the server does not hear of this.
        """
        calls = (self.client.abort(request_id, timeout_s) for request_id in list(self._requests))
        await asyncio.gather(*calls, return_exceptions=True)

    def drop_requests(self, writes: int | None = None) -> None:
        """End all requests with a ServerError.

        writes: end only requests that accept no tokens of this weight version.
        """
        for request in self._requests.values():
            if writes is None or writes < request.oldest_allowed:
                request.answer.cancel()

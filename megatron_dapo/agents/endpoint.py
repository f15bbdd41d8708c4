"""The endpoint of one trajectory: an agent's address of its model, and its secrets."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import aiohttp
import orjson

from megatron_dapo.agents.turns import Answer, TurnRefused


@dataclass(frozen=True)
class Endpoint:
    """Plain data, for any process."""

    base_url: str
    """For OpenAI's clients: it ends in /v1."""
    anthropic_url: str
    key: str
    """Also part of both URLs, so that a client needs no key, or takes any text as one."""
    name: str
    """The model's."""
    reward_url: str
    reward_key: str
    """Of its own, since an agent's tools may see `key`."""
    socket: str
    """Path of a Unix socket with the same routes, for sandboxes without a network."""

    def as_dict(self) -> dict[str, str]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, str]) -> "Endpoint":
        """Return the endpoint of `as_dict`."""
        return cls(**fields)

    async def generate(self, ids: Sequence[int], max_tokens: int | None = None) -> Answer:
        """Return the model's answer to tokens, in tokens.

        Tokens that begin with those of an earlier turn and its answer continue that branch.

        max_tokens: None: up to the room of the branch.

        Raises TurnRefused for a limit or a bad request, ConnectionError if the trajectory is lost.
        """
        body = orjson.dumps({"model": self.name, "ids": list(map(int, ids)), "max_tokens": max_tokens})
        no_limit = aiohttp.ClientTimeout(total=None)  # the trajectory's clock counts
        try:
            async with (
                aiohttp.ClientSession(timeout=no_limit) as client,
                client.post(f"{self.base_url}/tokens", data=body) as response,
            ):
                answer = orjson.loads(await response.read())
                if response.status != 200:
                    raise TurnRefused(response.status, answer["error"]["code"], answer["error"]["message"])
        except (aiohttp.ClientError, orjson.JSONDecodeError) as error:
            raise ConnectionError(f"the gateway ended the request: {error}") from error
        return Answer(answer["node"], tuple(answer["tokens"]), tuple(answer["log_probs"]), answer["finish_reason"])

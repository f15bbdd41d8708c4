"""Scores by a reward model: a sequence classifier on an SGLang server, asked in batches."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.samples import Prompt
from megatron_dapo.data.tokenizer import Messages, Tokenizer
from megatron_dapo.rewards.batches import Batches
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.server_error import KeyRefused, ServerError

_BATCH_SIZE = 32
_NUM_CALLS = 4  # batches under way: the server joins them
_PAUSE_S = 0.5  # between two attempts while the server is down

log = logging.getLogger(__name__)


class RewardModel:
    """The scores of responses by the classifier of `reward.model`."""

    def __init__(self, tokenizer: Tokenizer, client: SGLangClient, down_timeout_s: float) -> None:
        """Prepare the requests.

        Args:
            tokenizer: the classifier's own.
            client: of the server.
            down_timeout_s: how long the server may be away, before responses go without its score.
        """
        self._tokenizer = tokenizer
        self._client = client
        self._down_timeout_s = down_timeout_s
        self._batches = Batches(self._classify, _NUM_CALLS, _BATCH_SIZE)

    async def start(self, timeout_s: float) -> None:
        """Wait until the server is healthy. Raises UserError if it is late, or gives no scores."""
        try:
            await self._client.wait_healthy(timeout_s)
        except KeyRefused as error:
            raise UserError(
                f"reward.model.url is {self._client.url}, where the server {error.body}; give the file of its key as "
                f"reward.model.api_key_file."
            ) from None
        except ServerError as error:
            raise UserError(
                f"reward.model.url is {self._client.url}, but no server is ready there ({error}); start one, or leave "
                f"the key out to have one started."
            ) from None
        reply = await self._score("1+1=", "2")
        if "error" in reply:
            raise UserError(
                f"reward.model.url is {self._client.url}, but the server there gives no score ({reply['error']}); let "
                f"it serve the classifier of reward.model.path."
            )

    async def close(self) -> None:
        """End all requests."""
        await self._batches.close()
        await self._client.close()

    async def reply(self, prompt: Prompt, response: str) -> dict[str, Any]:
        """Return {"score": ...} or {"error": ...}."""
        return await self._score(prompt.messages, response)

    async def _score(self, messages: str | Messages, response: str) -> dict[str, Any]:
        try:
            tokens = self._tokenizer.encode_answered(messages, response)
        except ValueError as error:
            return {"error": f"exception: reward.model.path: {error}"}
        return await self._batches.reply(tokens)

    async def _classify(self, batch: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """Return {"verdicts": [{"score": ...}, ...]} or {"error": ...}.

        Wait for the server while it is down.
        """
        given_up_at = time.monotonic() + self._down_timeout_s
        while True:
            try:
                answers = await self._client.post("/classify", {"input_ids": [list(tokens) for tokens in batch]})
                return {"verdicts": [{"score": score} for score in _scores(answers, len(batch))]}
            except ServerError as error:
                if error.status is not None and error.status < 500:  # it refuses the request itself
                    return {"error": f"exception: {error}"}
                if time.monotonic() > given_up_at:
                    log.warning("the reward model gives no scores: %s", error)
                    return {"error": f"crash: {error}"}
            except ValueError as error:
                return {"error": f"exception: {error}"}
            await asyncio.sleep(_PAUSE_S)


def _scores(answers: Any, number: int) -> list[float]:
    """Return the scores of a server's answer. Raises ValueError unless each is a finite number."""
    rows = answers if isinstance(answers, list) else [answers]
    scores = [score for row in rows if (score := _score_of(row)) is not None]
    if len(scores) != number:
        raise ValueError(f"the reward model gave {len(scores)} finite scores for {number} responses")
    return scores


def _score_of(row: Any) -> float | None:
    """Return the only number of an answer; None for none or several (an embedding model's)."""
    match row:
        case {"embedding": [int() | float() as score]} if math.isfinite(score):
            return float(score)
    return None

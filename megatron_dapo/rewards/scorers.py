"""Scores beside those of the reward function: by a reward model, by a judge; and their sum as one
reward."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dapo.config.schema.run import RewardConfig
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.reward_result import RewardResult


class Scorer(Protocol):
    """Gives responses a score."""

    async def start(self, timeout_s: float) -> None:
        """Get ready. Raises UserError if it takes longer than timeout_s."""
        ...

    async def reply(self, prompt: Prompt, response: str) -> dict[str, Any]:
        """Return {"score": ...} or {"error": ...}, in words that begin with timeout, crash or
        exception."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class WeightedScorer:
    """A scorer and the factor of its scores."""

    scorer: Scorer
    weight: float


class Scorers:
    """All scorers of a run, each required for a reward."""

    def __init__(self, config: RewardConfig, scorers: Sequence[WeightedScorer]) -> None:
        self._config = config
        self._scorers = list(scorers)

    async def start(self, timeout_s: float) -> None:
        """Wait until all are ready. Raises UserError."""
        for each in self._scorers:
            await each.scorer.start(timeout_s)

    async def close(self) -> None:
        """Close all scorers."""
        for each in self._scorers:
            await each.scorer.close()

    async def combined(self, verdict: RewardResult, prompt: Prompt, response: str) -> RewardResult:
        """Return the function's verdict on a response with all scores added, or the first error.

        `correct` stays the function's; with the function `none`, a score above 0 is correct.
        """
        if verdict.error is not None or not self._scorers:
            return verdict
        replies = await asyncio.gather(*(each.scorer.reply(prompt, response) for each in self._scorers))
        for reply in replies:
            if "error" in reply:
                return RewardResult(verdict.score, correct=False, error=reply["error"], answer=verdict.answer)
        score = sum(each.weight * reply["score"] for each, reply in zip(self._scorers, replies, strict=True))
        correct = score > 0 if self._config.function == "none" else verdict.correct
        function_score = verdict.score if self._config.combine == "sum" else 0.0
        return RewardResult(function_score + score, correct, answer=verdict.answer)

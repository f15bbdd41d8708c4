"""From a prompt to a finished group: n responses, each rewarded as soon as it is there, then shaped."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.data.types import Group, Sample
from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rewards.shaping import OverlongShaping, shape
from megatron_dapo.rewards.types import RewardResult
from megatron_dapo.rollout.client import Generation, SamplingParams, ServerError
from megatron_dapo.rollout.errors import RolloutError
from megatron_dapo.rollout.server_pool import ServerPool
from megatron_dapo.rollout.token_checks import find_fault
from megatron_dapo.rollout.trajectory import Budget, MultiTurn, Trajectory, single_turn

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2  # before the first retry; doubled for each further one


async def run_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results in order. The first error cancels the others and is raised itself, not inside an exception
    group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            created = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in created]


@dataclass(frozen=True)
class RetryPolicy:
    """How requests to servers are repeated.

    request_timeout_s: deadline of one request; max_retries: further attempts after a failed one.
    """

    request_timeout_s: float
    max_retries: int


class Sampler:
    """The way from a prompt to its group: the servers, the reward pool and the tokenizer of the run.

    multi_turn: plays the samples with an environment; none = one turn each. greedy_baseline: one greedy answer per
    prompt beside its samples, whose shaped reward is the group's baseline.
    """

    def __init__(
        self,
        servers: ServerPool,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        retry: RetryPolicy,
        vocab_size: int,
        multi_turn: MultiTurn | None = None,
        greedy_baseline: bool = False,
    ) -> None:
        self._servers = servers
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._retry = retry
        self._vocab_size = vocab_size
        self._multi_turn = multi_turn
        self._greedy_baseline = greedy_baseline
        # "retries": failed requests that were sent again; by the servers' answers, "retractions": requests that a full
        # cache put back, "cached_tokens": of prompts that were still in the cache
        self.counts: Counter[str] = Counter()

    async def sample_group(
        self, group: Group, n: int, params: SamplingParams, shaping: OverlongShaping | None
    ) -> Group:
        """Return the group with n responses: the replayed one that it has, and new ones.

        Args:
            group: as it was drawn: its prompt, and the replayed response if there is one.
            n: responses, the replayed one included.
            params: how the new ones are sampled, by the weight version that the server pool expects.
            shaping: of their rewards; None leaves them as they are.

        Raises NeedsSync or RolloutError where the servers do not answer.
        """
        greedy = [replace(params, temperature=0.0, top_p=1.0, top_k=-1)] if self._greedy_baseline else []
        new = [params] * (n - len(group.samples))
        samples = await run_all(self._sample(group, each, shaping) for each in [*new, *greedy])
        baseline_reward = samples.pop().reward if greedy else None
        return replace(group, samples=(*group.samples, *samples), baseline_reward=baseline_reward)

    async def _sample(self, group: Group, params: SamplingParams, shaping: OverlongShaping | None) -> Sample:
        prompt = group.prompt
        play = self._multi_turn.play if self._multi_turn else single_turn
        trajectory = await play(prompt, params, partial(self._generate, group.uid))
        text = self._tokenizer.decode(trajectory.tokens)
        verdict = trajectory.verdict or await self._rewards.score(
            prompt.data_source, text, prompt.ground_truth, prompt.extra_info
        )
        return _to_sample(group.uid, trajectory, text, verdict, shaping)

    async def _generate(self, uid: str, tokens: Sequence[int], params: SamplingParams, budget: Budget) -> Generation:
        """Return what follows the tokens, by the server that the budget names where that one can take it.

        Raises NeedsSync, RolloutError, OutOfTime.
        """
        failures: dict[str, str] = {}  # url -> what went wrong there last
        num_failures = 0
        while True:
            async with self._servers.slot(avoid=failures, prefer=budget.server_url) as server:
                budget.server_url = server.url
                seconds_left = budget.seconds_left
                try:
                    async with budget.spend():
                        generation = await server.generate(tokens, params, self._retry.request_timeout_s)
                    self.counts["retractions"] += generation.num_retractions
                    self.counts["cached_tokens"] += generation.num_cached_tokens
                    reason = self._fault(generation)
                except ServerError as error:
                    reason = str(error)
                    if error.status is None:  # no answer: down, or hanging; its next health check tells
                        self._servers.mark_down(server, reason)
            if reason is None and self._is_current(generation):
                return generation
            if reason is None:  # no failure of the request: a stale server is not asked again, so this ends
                self._servers.mark_stale(server, f"it answered with version {generation.weight_versions[-1]}")
                continue
            failures[server.url] = reason
            budget.seconds_left = seconds_left  # what the failed server took
            num_failures += 1
            if num_failures > self._retry.max_retries:
                where = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
                raise RolloutError(f"a request for group {uid} failed {num_failures} times: {where}")
            log.warning("request for group %s failed on %s, sent again: %s", uid, server.url, reason)
            self.counts["retries"] += 1
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (num_failures - 1))

    def _fault(self, generation: Generation) -> str | None:
        """Return why an answer cannot be taken, whatever its weight version; None where it can.

        One with numbers that cannot be counts as a request that failed: it is sent to another server, and a server's
        health checks say nothing of it.
        """
        if generation.finish_reason == "abort":
            return "it aborted the request"
        fault = find_fault(generation.tokens, generation.log_probs, self._vocab_size)
        return f"its answer {fault}" if fault else None

    def _is_current(self, generation: Generation) -> bool:
        return all(version == self._servers.version for version in generation.weight_versions)


def _to_sample(
    uid: str, trajectory: Trajectory, text: str, verdict: RewardResult, shaping: OverlongShaping | None
) -> Sample:
    """Return a finished trajectory as a sample, with its reward shaped."""
    is_terminated = trajectory.finish_reason == "stop"
    reward, _ = shape(verdict.score, len(trajectory.tokens), not is_terminated, shaping)
    return Sample(
        uid=uid,
        prompt_tokens=trajectory.prompt_tokens,
        response_tokens=tuple(trajectory.tokens),
        response_text=text,
        rollout_log_probs=tuple(trajectory.log_probs),
        loss_mask=tuple(trajectory.loss_mask),
        weight_versions=tuple(trajectory.weight_versions),
        finish_reason=trajectory.finish_reason,
        raw_reward=verdict.score,
        correct=verdict.correct,
        reward=reward,
        is_truncated=not is_terminated,
        is_terminated=is_terminated,
        num_turns=trajectory.num_turns,
        servers=tuple(trajectory.servers),
        reward_error=verdict.error,
    )

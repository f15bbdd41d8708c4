"""From a prompt to a finished group: n responses, each rewarded at once, then shaped."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.common.rollout_errors import Aborted, NeedsSync, RolloutError
from megatron_dapo.config.key_names import ROUTER_REPLAY
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.data.samples import Group, PartialResponse, Sample
from megatron_dapo.data.token_arrays import TOKEN, TokenIds, joined
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.scorers import Scorers
from megatron_dapo.rewards.shaping import Shaping, reshaped, unshaped
from megatron_dapo.rollout.group_verdicts import GroupVerdicts
from megatron_dapo.rollout.time_spent import RewardWait
from megatron_dapo.rollout.token_checks import find_fault
from megatron_dapo.rollout.trajectory import Budget, Play, Trajectory, TrajectoryStart, single_turn
from megatron_dapo.servers.client import ExpertQuestion, Generation, SamplingParams
from megatron_dapo.servers.growing_answer import GrowingAnswer
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.server_pool import ServerPool

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2  # before the first retry; doubled for each further one
_LONGEST_PAUSE_S = 30.0


async def run_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results in order.

    The first error cancels the others and is raised itself, not inside an exception group.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            created = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in created]


class Sampler:
    """Turns prompts into groups, with the servers, the reward pool and the tokenizer of the run."""

    def __init__(
        self,
        servers: ServerPool,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        keys: RolloutConfig,
        vocab_size: int,
        shaping: Shaping = unshaped,
        play: Play = single_turn,
        greedy_baseline: bool = False,
        exact: bool = False,
        scorers: Scorers | None = None,
        routers: RouterShape | None = None,
        seed: int = 0,
        own_shaping: OwnFunction | None = None,
    ) -> None:
        """Prepare; nothing is sampled yet.

        Args:
            servers, rewards, tokenizer: of the run.
            keys: deadline and retries of a request.
            vocab_size: above all tokens that a server may answer with.
            shaping: of the rewards.
            play: the way to a response; only those of one turn can go on after a stop.
            greedy_baseline: ask for one greedy answer per prompt too; its shaped reward is the
                group's baseline.
            exact: accept only tokens of the weight version expected by the server pool. Else accept
                every version since the group's draw: a response may go on while weights are pushed.
            scorers: of responses, beside the rewards.
            routers: of the model, if samples need the experts chosen by the servers.
            seed: of the run; each request's seed derives from it, the group, the response and the
                turn.
            own_shaping: of the rewards, after `shaping`.
        """
        self._own_shaping = own_shaping
        self._servers = servers
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._keys = keys
        self._shaping = shaping
        self._vocab_size = vocab_size
        self._play = play
        self._greedy_baseline = greedy_baseline
        self._exact = exact
        self._scorers = scorers
        self._routers = routers
        self._seed = seed
        # "retries": failed requests that were sent again; by the servers' answers, "retractions":
        # requests put back by a full cache, "cached_tokens": of prompts still in the cache,
        # "moves": requests that went on at another server, "restarts": those whose
        # last server's tokens are lost
        self.counts: Counter[str] = Counter()
        self.reward_wait = RewardWait()

    async def sample_group(
        self,
        group: Group,
        n: int,
        params: SamplingParams,
        on_sample: Callable[[Sample], None] = lambda sample: None,
        on_partial: Callable[[PartialResponse], None] = lambda partial: None,
        elsewhere: Collection[int] = (),
    ) -> Group:
        """Return the group with the responses 0 to n - 1, by number.

        The group's responses stay; new ones may go on with partial ones.

        Args:
            group: as drawn, with its finished and replayed responses.
            n: number of all responses.
            params: of the new ones; each request gets a seed of its own.
            on_sample: called with each new response as soon as it is finished, regardless of the
                others.
            on_partial: called with an unfinished response of one turn. The pool's `abort_requests`
                ended it, it waited for its reward, or it had begun before and did not go on.
            elsewhere: numbers of the caller's own responses; they are not sampled.

        Raises NeedsSync or RolloutError if the servers do not answer, Aborted if requests were
        aborted. The first and the last of these are raised when the other responses are finished,
        or aborted too.
        """
        reasons: list[Aborted | NeedsSync] = []

        async def unless_ended(sampling: Callable[[], Awaitable[Sample]]) -> Sample | None:
            try:
                return await sampling()
            except (Aborted, NeedsSync) as reason:
                reasons.append(reason)
                if together is not None:
                    together.give_up(reason)
                return None

        async def sample(number: int) -> Sample:
            finished = await self._sample(group, number, params, begun.get(number), on_partial, together)
            on_sample(finished)
            return finished

        greedy = replace(params, temperature=0.0, top_p=1.0, top_k=-1)
        numbers = sorted({*range(n)} - {sample.number for sample in group.samples} - {*elsewhere})
        together = self._verdicts_together(group, len(numbers))
        begun = {response.number: response for response in group.partials}
        baseline = [partial(self._sample, group, n, greedy)] if self._greedy_baseline else []
        try:
            samples = await run_all(map(unless_ended, [*(partial(sample, number) for number in numbers), *baseline]))
        finally:
            if together is not None:
                together.close()
        if reasons:
            raise reasons[0]
        baseline_reward = samples.pop().reward if self._greedy_baseline else None
        by_number = sorted((*group.samples, *samples), key=lambda sample: sample.number)
        return replace(group, samples=tuple(by_number), baseline_reward=baseline_reward, partials=())

    async def _sample(
        self,
        group: Group,
        number: int,
        params: SamplingParams,
        begun: PartialResponse | None = None,
        on_partial: Callable[[PartialResponse], None] = lambda partial: None,
        together: GroupVerdicts | None = None,
    ) -> Sample:
        def note_partial(response: PartialResponse) -> None:
            on_partial(replace(response, number=number))

        seeds = (self._seed, group.uid, number)
        generate = partial(self._generate, group)
        with self.reward_wait.writing():
            trajectory = await self._play(
                TrajectoryStart(group.prompt, params, generate, seeds, number, begun, note_partial)
            )
        try:
            with self.reward_wait.scoring():
                verdict = await self._verdict(group, number, trajectory, together)
        except BaseException:  # mostly cancelled: a stop does not wait for a slow reward function
            if self._play is single_turn:
                note_partial(trajectory.partial())
            raise
        sample = _to_sample(group.uid, number, trajectory, verdict, self._shaping)
        return reshaped(self._own_shaping, sample, group.prompt)

    async def _verdict(
        self, group: Group, number: int, trajectory: Trajectory, together: GroupVerdicts | None
    ) -> RewardResult:
        if trajectory.verdict is not None:
            if together is not None:
                together.leave_out()
            return trajectory.verdict
        prompt = group.prompt
        text = self._scored_text(trajectory.own_answer, trajectory.last_tokens)
        if together is not None:
            verdict = await together.verdict(number, text)
        else:
            verdict = await self._rewards.score(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
        return verdict if self._scorers is None else await self._scorers.combined(verdict, prompt, text)

    def _verdicts_together(self, group: Group, num_new: int) -> GroupVerdicts | None:
        """Return the meeting point of a group's responses if its function scores them together."""
        if not self._rewards.scores_groups:
            return None
        prompt = group.prompt

        async def score(texts: Sequence[str]) -> list[RewardResult]:
            return await self._rewards.score_group(prompt.data_source, texts, prompt.ground_truth, prompt.extra_info)

        texts = {
            sample.number: self._scored_text(sample.own_answer, sample.branches[-1].response_tokens)
            for sample in group.samples
        }
        return GroupVerdicts(score, texts, num_new)

    def _scored_text(self, own_answer: str | None, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(tokens) if own_answer is None else own_answer

    async def _generate(self, group: Group, tokens: TokenIds, params: SamplingParams, budget: Budget) -> Generation:
        """Return the continuation of the tokens, preferably by the budget's server.

        A request that the pool moves goes on at another server, behind its tokens so far. While the
        pool aborts requests, a part of an answer counts as one, with the reason "abort".

        Raises NeedsSync, RolloutError, OutOfTime, Aborted, and UserError if a server hides its
        experts. The budget then has the parts of a moved answer.
        """
        answer = budget.answer = GrowingAnswer(group.uid)
        failures: dict[str, str] = {}  # url -> its last failure
        num_failures = 0
        while True:
            avoid = {*failures, answer.moved_from}
            async with self._servers.slot(avoid, budget.server_url, answer.moved_at is not None) as server:
                try:
                    part = await self._ask(server, group, tokens, params, budget)
                    reason = self._fault(part, answer)
                except ServerError as error:
                    reason = str(error)
                    # no answer: down, or hanging; its next health check tells
                    if error.status is None:
                        self._servers.mark_down(server, reason)
            if reason is None:
                whole = answer.whole(part)
                is_refused = ~self._accepts(group, whole.weight_versions)
                if not is_refused.any():
                    if part.finish_reason != "abort" or self._servers.is_aborting:
                        if self._routers is not None:
                            _require_experts(whole, server.url)
                        return whole
                    answer.move(part, server.url)
                    budget.server_url = None
                    self.counts["moves"] += 1
                    self.counts["restarts"] += len(part.tokens) < 2  # none is kept
                    continue
            self.counts["restarts"] += 1
            budget.refund()
            if reason is None:
                earlier, own = np.split(is_refused, [len(answer.tokens)])
                if earlier.any():
                    answer.parts = None
                if not own.any():  # no failure: the weights changed after a move
                    continue
                reason = f"it answered with version {whole.weight_versions[is_refused][-1]}"
                if own[-1]:  # no failure of the request, which is not counted:
                    # a server behind is not asked again, so this ends
                    self._servers.mark_behind(server, reason)
                    continue
            failures[server.url] = reason
            answer.moved_from = ""
            num_failures += 1
            if num_failures > self._keys.max_retries:
                where = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
                raise RolloutError(f"a request for group {group.uid} failed {num_failures} times: {where}")
            log.warning("request for group %s failed on %s, sent again: %s", group.uid, server.url, reason)
            self.counts["retries"] += 1
            num_doublings = min(num_failures - 1, 16)  # a float has no room for thousands
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**num_doublings, _LONGEST_PAUSE_S))

    async def _ask(
        self, server: Server, group: Group, tokens: TokenIds, params: SamplingParams, budget: Budget
    ) -> Generation:
        """Return the server's continuation of the tokens and of the answer's parts.

        Raises ServerError and OutOfTime.
        """
        answer = budget.answer
        answer.is_moving = False
        budget.server_url = server.url
        budget.cache_salt = budget.cache_salt or self._servers.cache_salt
        experts = None if self._routers is None else ExpertQuestion(self._routers, budget.num_routed)
        async with budget.spend():
            part = await server.generate(
                joined(TOKEN, tokens, answer.tokens),
                replace(params, max_new_tokens=params.max_new_tokens - len(answer.tokens)),
                self._keys.request_timeout_s,
                self._oldest_allowed(group),
                budget.cache_salt,
                experts,
                answer,
            )
        self.counts["retractions"] += part.num_retractions
        self.counts["cached_tokens"] += part.num_cached_tokens
        return part

    def _fault(self, part: Generation, answer: GrowingAnswer) -> str | None:
        """Return the reason to refuse a part regardless of its version; None for a sound one.

        A part with impossible numbers counts as a failed request: it is sent to another server,
        since a server's health checks say nothing of it.
        """
        if part.finish_reason == "abort" and not (self._servers.is_aborting or answer.is_moving):
            return "it aborted the request"
        fault = find_fault(part.tokens, part.log_probs, self._vocab_size)
        return f"its answer {fault}" if fault else None

    def _accepts(self, group: Group, versions: np.ndarray) -> np.ndarray:
        """Return, per token, whether these weights may write for the group."""
        oldest = self._oldest_allowed(group)
        return versions == oldest if self._exact else versions >= oldest

    def _oldest_allowed(self, group: Group) -> int:
        """Return the oldest weight version that may write for the group."""
        if not self._exact:
            return group.version
        assert self._servers.version is not None, "expect() comes first"
        return self._servers.version


def _require_experts(generation: Generation, url: str) -> None:
    if len(generation.tokens) and not len(generation.routed_experts) and generation.finish_reason != "abort":
        raise UserError(
            f"Server {url} does not return the experts of its routers, which {ROUTER_REPLAY} rollout "
            f"replays; start it with --enable-return-routed-experts, or set router_replay to old or off."
        )


def _to_sample(uid: str, number: int, trajectory: Trajectory, verdict: RewardResult, shaping: Shaping) -> Sample:
    """Return a finished trajectory as a sample, with its reward shaped."""
    is_terminated = trajectory.finish_reason == "stop"
    taken = (*Sample.ARRAYS, "finish_reason", "num_turns", "others", "own_answer")
    return Sample(
        **{name: getattr(trajectory, name) for name in taken},
        uid=uid,
        raw_reward=verdict.score,
        correct=verdict.correct,
        reward=shaping(verdict.score, trajectory.length, not is_terminated),
        is_truncated=not is_terminated,
        is_terminated=is_terminated,
        servers=tuple(trajectory.servers),
        reward_error=verdict.error,
        answer=verdict.answer,
        number=number,
    )

"""One response as it grows, and two ways to play it: in one turn, and with an environment.

Tokens in, tokens out: the server is sent exactly its own earlier tokens, with the environment's
between them. The model's own words are never tokenized again.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.common.seeds import seed_from
from megatron_dapo.config.schema.multi_turn import MultiTurnConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Branch, PartialResponse, Prompt
from megatron_dapo.data.token_arrays import EXPERT, LOG_PROB, MASK, TOKEN, VERSION, TokenIds, joined, nothing, repeated
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.envs.environment import Observation, Task
from megatron_dapo.envs.environment_pool import EnvironmentFailure, EnvironmentPool, EnvironmentSession
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.servers.client import Generation, SamplingParams
from megatron_dapo.servers.growing_answer import GrowingAnswer

_TEMPLATE_CURE = "use another actor_rollout_ref.rollout.multi_turn.environment, its role, or a model with another one"


class OutOfTime(Exception):
    """The trajectory used up its seconds."""


@dataclass
class Budget:
    """The time budget of one trajectory, and the state of its requests.

    Waiting for a slot and failed requests cost nothing: the model is not to blame.
    """

    seconds_left: float = math.inf  # at servers and in its environment
    seconds_spent: float = 0.0  # in the last block
    server_url: str | None = None  # the server with its prefix in the cache
    # requests share cached prefixes only with others of the same salt
    cache_salt: str | None = None
    num_routed: int = 0  # first tokens with routed experts from earlier requests
    answer: GrowingAnswer = field(default_factory=GrowingAnswer)  # of the present turn

    @contextmanager
    def charge(self) -> Iterator[None]:
        """Subtract the time inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds_spent = time.monotonic() - began
            self.seconds_left -= self.seconds_spent

    def refund(self) -> None:
        """Give back the time of the last block: its request failed, or its answer is not taken."""
        self.seconds_left += self.seconds_spent

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        """Subtract the time inside; end the block with OutOfTime when none is left."""
        try:
            with self.charge():
                async with asyncio.timeout(None if math.isinf(self.seconds_left) else self.seconds_left) as limit:
                    yield
        except TimeoutError:
            if limit.expired():
                raise OutOfTime from None
            raise


Generate = Callable[[TokenIds, SamplingParams, Budget], Awaitable[Generation]]


@dataclass(frozen=True)
class TrajectoryStart:
    """The beginning of a trajectory, and its way to the servers."""

    prompt: Prompt
    params: SamplingParams  # max_new_tokens limits a whole response, with all that is read
    generate: Generate
    seeds: tuple[int | str, ...] = ()  # of the run, the group and the response; others derive from it
    number: int = 0  # of the response
    begun: PartialResponse | None = None  # of one turn, not asked for again
    # called with the unfinished response of one turn if it does not end
    on_partial: Callable[[PartialResponse], None] = lambda partial: None

    def seeded(self, turn: int) -> SamplingParams:
        """Return the parameters of a turn's request.

        SGLang mixes the position of a token into the seed: a response that goes on with a partial
        one, in the same turn, gets the same tokens as without the break.
        """
        return replace(self.params, sampling_seed=seed_from(*self.seeds, turn))


@dataclass(eq=False)
class Trajectory:
    """One response as it grows.

    The arrays are [L], its length so far; they are replaced, never written into.
    """

    prompt_tokens: TokenIds  # with an environment's opening
    response_tokens: np.ndarray = field(default_factory=partial(nothing, TOKEN))
    rollout_log_probs: np.ndarray = field(default_factory=partial(nothing, LOG_PROB))
    loss_mask: np.ndarray = field(default_factory=partial(nothing, MASK))
    weight_versions: np.ndarray = field(default_factory=partial(nothing, VERSION))
    # of prompt and response but the last token, if asked of the servers (`data.routed_experts`)
    routed_experts: np.ndarray = field(default_factory=partial(nothing, EXPERT))
    num_turns: int = 0  # of the model
    servers: list[str] = field(default_factory=list)  # URLs of the servers that wrote its turns
    # "stop": by itself; "length", "turns", "time": by a limit; "environment", "agent":
    # by its failure
    finish_reason: str = "stop"
    # of the environment or agent; without it the reward function scores the response
    verdict: RewardResult | None = None
    solved: bool | None = None  # last word of the environment; None without one
    others: tuple[Branch, ...] = ()  # an agent's further branches
    own_answer: str | None = None  # an agent's, to score in place of the last branch's text

    @property
    def last_tokens(self) -> np.ndarray:
        """Return the response of the last branch, the one to score."""
        return self.others[-1].response_tokens if self.others else self.response_tokens

    @property
    def length(self) -> int:
        """Return the tokens of the longest branch's response."""
        return max(len(self.response_tokens), *(len(branch.response_tokens) for branch in self.others), 0)

    def add_model_turn(self, generation: Generation) -> None:
        """Add a turn of the model."""
        self._add(generation.tokens, generation.log_probs, 1, generation.weight_versions)
        # with those of an environment's tokens before it
        self.routed_experts = np.concatenate([self.routed_experts, generation.routed_experts])
        self.num_turns += 1
        self.servers += [url for url in generation.servers if url not in self.servers]

    def add_environment_turn(self, tokens: Sequence[int]) -> None:
        """Add tokens for the model to read.

        They have no loss, log-prob 0, and the weight version of the turn before.
        """
        version = self.weight_versions[-1] if len(self.weight_versions) else 0
        self._add(tokens, np.zeros(len(tokens), LOG_PROB), 0, repeated(version, len(tokens), VERSION))

    def resume(self, begun: PartialResponse, max_tokens: int) -> None:
        """Take over a partial response."""
        self._add(begun.tokens[:max_tokens], begun.log_probs[:max_tokens], 1, begun.weight_versions[:max_tokens])
        self.servers += begun.servers

    def partial(self) -> PartialResponse:
        """Return the unfinished response of one turn, for a later request.

        That request reads it again, and is answered with the experts of all of it. The last token
        is left out: it may end the response, even if SGLang says "abort", and nothing may follow an
        end.
        """
        return PartialResponse(
            self.response_tokens[:-1], self.rollout_log_probs[:-1], self.weight_versions[:-1], tuple(self.servers)
        )

    def _add(self, tokens: TokenIds, log_probs: np.ndarray, mask: int, weight_versions: np.ndarray) -> None:
        self.response_tokens = joined(TOKEN, self.response_tokens, tokens)
        self.rollout_log_probs = joined(LOG_PROB, self.rollout_log_probs, log_probs)
        self.loss_mask = joined(MASK, self.loss_mask, repeated(mask, len(tokens), MASK))
        self.weight_versions = joined(VERSION, self.weight_versions, weight_versions)

    def add_reward(self, observation: Observation) -> None:
        """Add the reward of a turn; the last word on correctness holds."""
        if observation.reward is None:
            return
        score = (self.verdict.score if self.verdict else 0.0) + observation.reward
        self.solved = self.solved if observation.correct is None else observation.correct
        self.verdict = RewardResult(score, score > 0 if self.solved is None else self.solved)

    def fail(self, reason: str, who: Literal["environment", "agent"] = "environment") -> None:
        """End it by a failure: rewards so far count, the task is not solved."""
        self.finish_reason = who
        score = self.verdict.score if self.verdict else 0.0
        self.verdict = RewardResult(score, correct=False, error=f"{who}: {reason}")


Play = Callable[[TrajectoryStart], Awaitable[Trajectory]]
"""A way to a whole trajectory. Raises Aborted if it is aborted, and the errors of `generate`."""


async def single_turn(start: TrajectoryStart) -> Trajectory:
    """Return a trajectory of one response, without an environment: a `Play`."""
    prompt, params, begun, on_partial = start.prompt, start.seeded(0), start.begun, start.on_partial
    trajectory = Trajectory(prompt.tokens)
    if begun is not None:
        trajectory.resume(begun, params.max_new_tokens)
    rest = params.max_new_tokens - len(trajectory.response_tokens)
    if rest <= 0:
        trajectory.num_turns = 1
        trajectory.finish_reason = "length"
        return trajectory
    so_far = joined(TOKEN, prompt.tokens, trajectory.response_tokens)
    budget = Budget()
    try:
        generation = await start.generate(so_far, replace(params, max_new_tokens=rest), budget)
    except BaseException:  # also if it is cancelled
        if budget.answer.parts is not None:
            trajectory.add_model_turn(budget.answer.parts)
            on_partial(trajectory.partial())
        elif begun is not None:
            on_partial(begun)
        raise
    trajectory.add_model_turn(generation)
    if generation.finish_reason == "abort":
        if len(trajectory.response_tokens):
            on_partial(trajectory.partial())
        raise Aborted
    trajectory.finish_reason = generation.finish_reason
    return trajectory


@dataclass(frozen=True)
class MultiTurn:
    """Plays trajectories of several turns."""

    environments: EnvironmentPool
    tokenizer: Tokenizer
    data: DataConfig  # chat template, and the limit of a prompt with the environment's opening
    keys: MultiTurnConfig  # limits of turns and seconds

    async def play(self, start: TrajectoryStart) -> Trajectory:
        """Return a whole trajectory: a `Play`.

        A failure of its environment ends it and stands in its verdict. Raises UserError if the chat
        template refuses the environment's messages.
        """
        trajectory = Trajectory(start.prompt.tokens)
        try:
            async with self.environments.session(seed_from(*start.seeds)) as environment:
                trajectory.finish_reason = await self._play(trajectory, start, environment)
        except EnvironmentFailure as failure:
            trajectory.fail(failure.reason)
        return trajectory

    async def _play(self, trajectory: Trajectory, start: TrajectoryStart, environment: EnvironmentSession) -> str:
        """Fill the trajectory; return the reason of its end."""
        prompt = start.prompt
        budget = Budget(self.keys.timeout_s)
        task = Task(prompt.text, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        with budget.charge():
            opening = await environment.reset(task)
        trajectory.prompt_tokens = self._prompt_tokens(prompt, opening)
        trajectory.add_reward(opening)
        if opening.done:
            return "stop"
        environment_tokens: tuple[int, ...] = ()  # they count once the model answered them
        while True:
            room = start.params.max_new_tokens - len(trajectory.response_tokens) - len(environment_tokens)
            if room <= 0:  # to answer
                return "length"
            params = start.seeded(trajectory.num_turns)
            turn = replace(params, max_new_tokens=min(room, self.keys.max_tokens_per_turn or room))
            try:
                so_far = joined(TOKEN, trajectory.prompt_tokens, trajectory.response_tokens, environment_tokens)
                generation = await start.generate(so_far, turn, budget)
            except OutOfTime:
                return "time"
            if generation.finish_reason == "abort":  # an environment's state cannot be restored
                raise Aborted
            trajectory.add_environment_turn(environment_tokens)
            trajectory.add_model_turn(generation)
            budget.num_routed = len(so_far) + len(generation.tokens) - 1
            if generation.finish_reason == "length" and turn.max_new_tokens == room:
                return "length"
            with budget.charge():  # without an end: the pool's own limit ends a step
                observation = await environment.step(self.tokenizer.decode(generation.tokens))
            trajectory.add_reward(observation)
            if observation.done:
                return "stop"
            if trajectory.num_turns >= self.keys.max_turns:
                return "turns"
            if budget.seconds_left <= 0.0:
                return "time"
            last_token = int(generation.tokens[-1]) if len(generation.tokens) else None
            with _template_errors():
                environment_tokens = self.tokenizer.encode_turn(
                    observation.messages, last_token, self.data.apply_chat_template
                )

    def _prompt_tokens(self, prompt: Prompt, opening: Observation) -> tuple[int, ...]:
        """Return the prompt with the environment's first words behind its own messages."""
        if not opening.messages:
            return prompt.tokens
        with _template_errors():
            tokens, _ = self.tokenizer.encode_prompt([*prompt.chat, *opening.messages], self.data.apply_chat_template)
        if len(tokens) > self.data.max_prompt_length:
            raise EnvironmentFailure(
                f"exception: the prompt with the first observation has {len(tokens)} tokens, "
                f"data.max_prompt_length is {self.data.max_prompt_length}"
            )
        return tokens


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raise a refusal by the chat template as UserError with a cure."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"multi-turn: {error}; {_TEMPLATE_CURE}.") from error

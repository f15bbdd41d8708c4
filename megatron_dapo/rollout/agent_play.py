"""Plays the trajectories of agents: programs that ask for turns by HTTP, until they end."""

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from megatron_dapo.agents.agent_pool import AgentFailure, AgentPool
from megatron_dapo.agents.forest import Forest, Node, up_to_stop
from megatron_dapo.agents.gateways import GatewayLost, Gateways, Session
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.turns import Answer, Limits, SessionNotes, Turn, TurnRefused
from megatron_dapo.common.places import Places
from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.config.schema.agent import AgentConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.token_arrays import TOKEN, joined, token_array
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.agent_metrics import AgentMetrics
from megatron_dapo.rollout.sampling import run_all
from megatron_dapo.rollout.time_spent import TimeSpent
from megatron_dapo.rollout.trajectory import Budget, Trajectory, TrajectoryStart
from megatron_dapo.servers.client import Generation
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.server_pool import ServerPool

log = logging.getLogger(__name__)

_PARSE_S = 60.0  # a server's limit to take a text apart
_LOOK_S = 0.02  # between two looks at a clock that stands still
# code of the error that an agent's last request got -> the trajectory's finish reason
_REFUSALS = {"context_length_exceeded": "length", "max_turns": "turns", "max_branches": "turns"}


class Agents:
    """The agents of a run: who runs them, who speaks with them, and their places."""

    def __init__(self, keys: AgentConfig, gateways: Gateways, pool: AgentPool) -> None:
        self.keys = keys
        self.gateways = gateways
        self.pool = pool
        self.places = Places(keys.max_open)
        self.metrics = AgentMetrics()  # of training

    async def start(self) -> None:
        """Start the processes. Raises UserError for an unusable agent or port, WorkerLost."""
        await self.gateways.start()
        await self.pool.start()

    async def close(self) -> None:
        """End the processes. Idempotent."""
        await self.pool.close()
        await self.gateways.close()


class _Attempt:
    """One try of a trajectory: answers its gateway's requests, and keeps the answers."""

    def __init__(self, start: TrajectoryStart, number: int, timeout_s: float, tokenizer: Tokenizer) -> None:
        self.forest = Forest(*start.seeds, number)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_late = False
        self.servers: dict[str, None] = {}  # URLs, the last one used last
        self._start = start
        self._tokenizer = tokenizer
        self._salt: str | None = None
        self._num_open = self._num_waiting = 0  # requests; those that wait for a place at a server
        self._seconds_left = timeout_s
        self._clock, self._tools = TimeSpent(), TimeSpent()
        self.note(0, 0)

    async def become_late(self) -> None:
        """Return when its seconds are used up; they stand still while a request waits for a place."""
        while (left := self._seconds_left) > 0:
            await asyncio.sleep(max(left, _LOOK_S))
            self._seconds_left -= self._clock.take()
        self.is_late = True

    def tool_s(self) -> float:
        """Return the seconds without a request; asked once."""
        return self._tools.take()

    async def answer(self, turn: Turn) -> list[Answer]:
        """Return the answers to a request: an `AnswerTurn`. A failure of servers ends the attempt."""
        suffix = token_array(turn.suffix, TOKEN)
        self.note(1, 0)
        try:
            seeds = [self.forest.next_seed(turn.parent, suffix) for _ in range(turn.num_answers)]
            generations = await run_all(self._generate(turn, suffix, seed) for seed in seeds)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
                self.failure.exception()  # the attempt may have ended already
            raise TurnRefused(403, "trajectory_ended", "the trajectory has ended") from error
        finally:
            self.note(-1, 0)
        return [
            self._answer(Node(turn.parent, suffix, generation, seed, turn.request, choice))
            for choice, (generation, seed) in enumerate(zip(generations, seeds, strict=True))
        ]

    def _answer(self, node: Node) -> Answer:
        number, written = self.forest.add(node), node.generation
        for url in written.servers:
            self.servers[url] = self.servers.pop(url, None)
        reason = written.finish_reason
        return Answer(number, tuple(written.tokens.tolist()), tuple(written.log_probs.tolist()), reason)

    async def _generate(self, turn: Turn, suffix: np.ndarray, seed: int) -> Generation:
        before = self.forest.tokens(turn.parent)
        writers = [*self.servers] if turn.parent is None else self.forest.nodes[turn.parent].generation.servers
        budget = _RequestBudget(
            server_url=writers[-1] if writers else None,
            cache_salt=self._salt,
            num_routed=max(len(before) - 1, 0),
            attempt=self,
        )
        params = replace(
            self._start.params, max_new_tokens=turn.max_new_tokens, stop=tuple(turn.stop), sampling_seed=seed
        )
        self.note(0, 1)
        try:
            generation = await self._start.generate(joined(TOKEN, before, suffix), params, budget)
        finally:
            self.note(0, -1)
        self._salt = self._salt or budget.cache_salt
        if generation.finish_reason == "abort":  # an agent's state cannot be restored
            raise Aborted
        if budget.answer.parts is None or not turn.stop:
            return generation
        num_read = len(before) + len(suffix) - budget.num_routed
        return up_to_stop(generation, turn.stop, num_read, self._tokenizer.decode)

    def note(self, num_open: int, num_waiting: int) -> None:
        """Change the numbers of requests."""
        self._num_open += num_open
        self._num_waiting += num_waiting
        self._clock.switch(not self._num_waiting)
        self._tools.switch(not self._num_open)


@dataclass
class _RequestBudget(Budget):
    """The budget of one request: its time is its trajectory's."""

    attempt: _Attempt | None = None

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        assert self.attempt is not None
        self.attempt.note(0, -1)
        try:
            yield
        finally:
            self.attempt.note(0, 1)


@dataclass(frozen=True)
class AgentPlay:
    """Plays trajectories, each with an agent of its own."""

    agents: Agents
    servers: ServerPool
    tokenizer: Tokenizer
    data: DataConfig  # the limit of a branch's first prompt
    is_validation: bool = False  # told to the agent; such trajectories are in no metric of a step

    async def play(self, start: TrajectoryStart) -> Trajectory:
        """Return a whole trajectory: a `Play`.

        A failed agent begins anew, `max_restarts` times; then the failure stands in the verdict.
        """
        keys = self.agents.keys
        async with self.agents.places.taken():
            for number in count():
                attempt = _Attempt(start, number, keys.timeout_s, self.tokenizer)
                try:
                    return await self._try(start, attempt)
                except (AgentFailure, GatewayLost) as error:
                    reason = error.reason if isinstance(error, AgentFailure) else f"crash: {error}"
                log.info("the agent of response %d to %s failed: %s", start.number, start.seeds[1], reason)
                is_last = number == keys.max_restarts
                if not self.is_validation:
                    self.agents.metrics.count({"lost": attempt.forest.num_tokens, "restarts": not is_last})
                if is_last:
                    break
        trajectory = Trajectory(start.prompt.tokens)
        trajectory.fail(reason, "agent")
        return trajectory

    async def _try(self, start: TrajectoryStart, attempt: _Attempt) -> Trajectory:
        """Return the trajectory of an attempt. Raises AgentFailure, GatewayLost, and the servers' errors."""
        keys = self.agents.keys
        limits = Limits(
            max_prompt_tokens=self.data.max_prompt_length,
            max_response_tokens=start.params.max_new_tokens,
            max_turns=keys.max_turns,
            max_branches=keys.max_branches,
            max_tokens_per_turn=keys.max_tokens_per_turn,
            max_choices=keys.max_choices,
        )
        outcome: Outcome | None = None
        failure: AgentFailure | None = None
        async with self.agents.gateways.session(limits, attempt.answer, self._parse) as session:
            try:
                outcome = await self._run(start, attempt, session)
            except AgentFailure as error:  # perhaps because its last request was refused
                failure = error
            await session.close_requests()
        kept, left_out = attempt.forest.kept(session.notes.delivered)
        trajectory = _trajectory(start, attempt, kept, session.notes)
        if trajectory.finish_reason == "stop":
            if failure is not None:
                raise failure
            if not kept:
                refused = session.notes.refusal
                why = f"; its last request was refused: {refused}" if refused else ""
                raise AgentFailure(f"crash: it ended without having read an answer of the model{why}")
            if outcome is None:
                trajectory.finish_reason = "turns"  # it went on asking
        outcome = outcome or Outcome()
        judged = outcome if outcome.reward is not None else session.posted or outcome
        if judged.reward is not None:
            correct = judged.reward > 0 if judged.correct is None else judged.correct
            trajectory.verdict = RewardResult(judged.reward, correct)
        if not self.is_validation:
            num_errors = int(bool(outcome.error or judged.error))
            self.agents.metrics.count({**session.notes.counts, **left_out, "errors": num_errors})
            self.agents.metrics.add(attempt.tool_s(), {**judged.metrics, **outcome.metrics})
        return trajectory

    async def _run(self, start: TrajectoryStart, attempt: _Attempt, session: Session) -> Outcome | None:
        """Run the agent to its end; None if it had to be killed after a limit.

        Raises AgentFailure, GatewayLost, and the errors of its requests.
        """
        prompt, messages = start.prompt, start.prompt.messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        of_row = (prompt.text, messages, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        task = AgentTask(*of_row, number=start.number, is_validation=self.is_validation)
        agent = asyncio.create_task(self.agents.pool.run(task, session.endpoint, math.inf))
        lost = asyncio.create_task(session.lost.wait())
        late = asyncio.create_task(attempt.become_late())
        ends: set[asyncio.Future] = {agent, attempt.failure, lost}
        try:
            await asyncio.wait({*ends, late, session.limit}, return_when=asyncio.FIRST_COMPLETED)
            if late.done():
                await session.close_requests()
            if not any(end.done() for end in ends):
                timeout_s = self.agents.keys.end_timeout_s
                await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if attempt.failure.done():
                attempt.failure.result()
            if lost.done():
                raise GatewayLost("its gateway has ended")
            return agent.result() if agent.done() else None
        finally:
            for work in (agent, lost, late):
                work.cancel()
            await asyncio.wait({agent, lost, late})

    async def _parse(self, route: str, fields: dict) -> Any:
        """Return a server's answer, also of a paused one: a `Parse`. Raises ValueError if it refuses."""
        while True:
            servers = [server for server in self.servers.servers if server.answers]
            for server in random.sample(servers, len(servers)):
                try:
                    return await server.client.post(route, fields, _PARSE_S)
                except ServerError as error:
                    if error.status is not None:
                        raise ValueError(str(error)) from error
            await self.servers.wait_for_slot_change()


def _trajectory(start: TrajectoryStart, attempt: _Attempt, kept: Sequence[int], notes: SessionNotes) -> Trajectory:
    """Return the trajectory of an attempt's answers, with the reason of its end."""
    branches = attempt.forest.branches(kept)
    trajectory = Trajectory(start.prompt.tokens)
    if branches:
        first, *others = branches
        trajectory = Trajectory(
            prompt_tokens=first.prompt_tokens,
            tokens=first.response_tokens,
            log_probs=first.rollout_log_probs,
            loss_mask=first.loss_mask,
            weight_versions=first.weight_versions,
            routed_experts=first.routed_experts,
            num_turns=len(kept),
            servers=[*attempt.servers],
            others=tuple(others),
        )
        is_cut = attempt.forest.nodes[kept[-1]].generation.finish_reason == "length"
        if is_cut and len(trajectory.last_tokens) >= start.params.max_new_tokens:  # no room is left
            trajectory.finish_reason = "length"
    trajectory.finish_reason = _REFUSALS.get(notes.refusal or "", trajectory.finish_reason)
    if attempt.is_late:
        trajectory.finish_reason = "time"
    return trajectory

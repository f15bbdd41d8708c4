"""Plays the trajectories of agents: programs that ask for turns by HTTP, until they end."""

import asyncio
import logging
import math
import random
from collections import ChainMap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
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
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.is_late = False
        self.num_written = 0  # tokens, also of requests without an answer
        self.tools = TimeSpent()  # without a request
        self._start = start
        self._tokenizer = tokenizer
        self._salt: str | None = None
        self._open: set[asyncio.Task] = set()  # requests
        self._num_waiting = 0  # of them for a place at a server
        self.seconds_left = timeout_s
        self._clock = TimeSpent()
        self.note(0)

    async def become_late(self) -> None:
        """Return when its seconds are used up; they stand still while a request waits for a place."""
        while (left := self.seconds_left) > 0:
            await asyncio.sleep(max(left, _LOOK_S))
            self.seconds_left -= self._clock.take()
        self.is_late = True

    async def answer(self, turn: Turn) -> list[Answer]:
        """Return the answers to a request: an `AnswerTurn`. A failure of servers ends the attempt."""
        suffix = token_array(turn.suffix, TOKEN)
        asked = asyncio.current_task()
        assert asked is not None, "of a question"
        self._open.add(asked)
        self.note(0)
        try:
            seeds = [self.forest.next_seed(turn.parent, suffix) for _ in range(turn.num_answers)]
            generations = await run_all(self._generate(turn, suffix, seed) for seed in seeds)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise TurnRefused(403, "trajectory_ended", "the trajectory has ended") from error
        finally:
            self._open.discard(asked)
            self.note(0)
        answers = []
        for choice, (seed, written) in enumerate(zip(seeds, generations, strict=True)):
            number = self.forest.add(Node(turn.parent, suffix, written, seed, turn.request, choice))
            tokens, log_probs = tuple(written.tokens.tolist()), tuple(written.log_probs.tolist())
            answers.append(Answer(number, tokens, log_probs, written.finish_reason))
        return answers

    async def _generate(self, turn: Turn, suffix: np.ndarray, seed: int) -> Generation:
        before = self.forest.tokens(turn.parent)
        latest = self.forest.nodes[-1:] if turn.parent is None else [self.forest.nodes[turn.parent]]
        budget = _RequestBudget(
            server_url=next((url for node in latest for url in reversed(node.generation.servers)), None),
            cache_salt=self._salt,
            num_routed=max(len(before) - 1, 0),
            attempt=self,
        )
        params = replace(self._start.params, max_new_tokens=turn.max_new_tokens, stop=turn.stop, sampling_seed=seed)
        self.note(1)
        try:
            generation = await self._start.generate(joined(TOKEN, before, suffix), params, budget)
        except asyncio.CancelledError:
            self.num_written += len(budget.answer.tokens) + budget.answer.num_given_up
            raise
        finally:
            self.note(-1)
        self.num_written += len(generation.tokens)
        self._salt = self._salt or budget.cache_salt
        if generation.finish_reason == "abort":  # an agent's state cannot be restored
            raise Aborted
        if budget.answer.parts is None or not turn.stop:
            return generation
        num_read = len(before) + len(suffix) - budget.num_routed
        return up_to_stop(generation, turn.stop, num_read, self._tokenizer.decode)

    def note(self, num_waiting: int) -> None:
        """Note a change in the requests. num_waiting: added to those that wait for a place."""
        self._num_waiting += num_waiting
        self._clock.switch(not self._num_waiting)
        self.tools.switch(not self._open)

    async def given_up(self) -> None:
        """Return when requests for which nobody waits have ended: then all tokens are counted."""
        if self._open:
            await asyncio.wait(self._open)


@dataclass
class _RequestBudget(Budget):
    """The budget of one request: its time is its trajectory's."""

    attempt: _Attempt | None = None

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        assert self.attempt is not None
        self.attempt.note(-1)
        try:
            with self.charge():
                yield
        finally:
            self.attempt.note(1)

    def refund(self) -> None:
        assert self.attempt is not None
        self.attempt.seconds_left += self.seconds_spent


@dataclass(frozen=True)
class AgentPlay:
    """Plays trajectories, each with an agent of its own."""

    agents: Agents
    servers: ServerPool
    tokenizer: Tokenizer
    data: DataConfig  # the limit of a branch's first prompt
    is_validation: bool = False  # told to the agent

    @property
    def _metrics(self) -> AgentMetrics:
        """Return the step's; trajectories of a validation are in none."""
        return AgentMetrics() if self.is_validation else self.agents.metrics

    async def play(self, start: TrajectoryStart) -> Trajectory:
        """Return a whole trajectory: a `Play`.

        A failed agent begins anew, `max_restarts` times; then the failure stands in the verdict.
        """
        keys = self.agents.keys
        async with self.agents.places.taken():
            for num_left in range(keys.max_restarts, -1, -1):
                attempt = _Attempt(start, keys.max_restarts - num_left, keys.timeout_s, self.tokenizer)
                try:
                    return await self._try(start, attempt)
                except BaseException as error:
                    is_failure = isinstance(error, AgentFailure | GatewayLost)
                    is_restart = is_failure and num_left > 0
                    if is_failure:
                        await attempt.given_up()
                    self._metrics.add({"restarts": is_restart, "tokens_lost": attempt.num_written})
                    if not is_failure:  # its servers are lost, or it is stopped
                        raise
                    reason = f"crash: {error}" if isinstance(error, GatewayLost) else str(error)
                log.info("the agent of response %d to %s failed: %s", start.number, start.seeds[1], reason)
        trajectory = Trajectory(start.prompt.tokens)
        trajectory.fail(reason, "agent")
        return trajectory

    async def _try(self, start: TrajectoryStart, attempt: _Attempt) -> Trajectory:
        """Return the trajectory of an attempt. Raises AgentFailure, GatewayLost, and the servers' errors."""
        limited = {"max_turns", "max_branches", "max_tokens_per_turn", "max_choices"}
        of_keys = self.agents.keys.model_dump(include=limited)
        limits = Limits(self.data.max_prompt_length, start.params.max_new_tokens, **of_keys)
        outcome: Outcome | None = None
        failure: AgentFailure | None = None
        async with self.agents.gateways.session(limits, attempt.answer, self._parse) as session:
            try:
                outcome = await self._run(start, attempt, session)
            except AgentFailure as error:  # perhaps because its last request was refused
                failure = error
        await attempt.given_up()
        kept, left_out = attempt.forest.kept(session.notes.delivered)
        left_out["tokens_undelivered"] += attempt.num_written - attempt.forest.num_tokens()
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
        said = [each for each in (outcome, session.posted) if each is not None]  # the first word counts
        for each in said:
            if each.reward is not None and trajectory.verdict is None:
                correct = each.reward > 0 if each.correct is None else each.correct
                trajectory.verdict = RewardResult(each.reward, correct)
            if trajectory.own_answer is None:
                trajectory.own_answer = each.answer
        counts = {**session.notes.counts, **left_out, "errors": any(each.error for each in said)}
        self._metrics.add(counts, ChainMap({"tool_s": attempt.tools.take()}, *(each.metrics for each in said)))
        return trajectory

    async def _run(self, start: TrajectoryStart, attempt: _Attempt, session: Session) -> Outcome | None:
        """Run the agent to its end; None if it had to be killed after a limit.

        Raises AgentFailure, GatewayLost, and the errors of its requests.
        """
        prompt = start.prompt
        of_row = (prompt.text, prompt.chat, prompt.data_source, prompt.ground_truth, prompt.extra_info)
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
                raise attempt.failure.result()
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
    trajectory = Trajectory(start.prompt.tokens)
    if kept:
        first, *others = attempt.forest.branches(kept)
        trajectory = Trajectory(
            **{name: getattr(first, name) for name in first.ARRAYS},
            num_turns=len(kept),
            servers=[*dict.fromkeys(url for node in attempt.forest.nodes for url in node.generation.servers)],
            others=tuple(others),
        )
        is_cut = attempt.forest.nodes[kept[-1]].generation.finish_reason == "length"
        if is_cut and len(trajectory.last_tokens) >= start.params.max_new_tokens:  # no room is left
            trajectory.finish_reason = "length"
    trajectory.finish_reason = _REFUSALS.get(notes.refusal or "", trajectory.finish_reason)
    if attempt.is_late:
        trajectory.finish_reason = "time"
    return trajectory

"""Stand-ins for gateways and runner, in one process: an agent is an async function of a task and a
model."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_dapo.agents.agent_pool import AgentFailure
from megatron_dapo.agents.gateways import GatewayLost
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.turns import Answer, Limits, SessionNotes, Turn, TurnRefused
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.agent import AgentConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Group
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.agent_play import AgentPlay, Agents
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import Generation, SamplingParams
from tests.synthetic import synthetic_groups

Agent = Callable[[AgentTask, "Model"], Awaitable[Outcome]]


class ScriptedSession:
    """As a trajectory at its gateway."""

    def __init__(self, limits: Limits, answer: Any, parse: Any) -> None:
        self.limits, self.answer, self.parse = limits, answer, parse
        self.notes = SessionNotes()
        self.posted: Outcome | None = None
        self.lost = asyncio.Event()
        self.limit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.endpoint = Model(self)
        self.is_closed = False
        self.running: set[asyncio.Task] = set()

    async def close_requests(self) -> None:
        self.is_closed = True
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        if self.lost.is_set():
            raise GatewayLost("scripted")


class ScriptedGateways:
    """Opens sessions; `sessions` has all of them, `num_open` those in use."""

    def __init__(self, *_: Any) -> None:
        self.sessions: list[ScriptedSession] = []
        self.num_open = self.most_open = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        assert not self.num_open, "a trajectory is still open"

    @asynccontextmanager
    async def session(self, limits: Limits, answer: Any, parse: Any):
        session = ScriptedSession(limits, answer, parse)
        self.sessions.append(session)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield session
            await session.close_requests()
        finally:
            self.num_open -= 1
            session.is_closed = True
            for task in session.running:
                task.cancel()


class Model:
    """An agent's way to the model: it asks in tokens, as a gateway would."""

    def __init__(self, session: ScriptedSession) -> None:
        self.session = session
        self.asked: list[Answer] = []
        self._requests = count()

    async def ask(
        self, suffix, parent: int | None = None, n: int = 1, stop=(), room: int = 4, is_delivered: bool = True
    ) -> list[Answer]:
        session = self.session
        if session.is_closed:
            raise TurnRefused(403, "closed", "the trajectory has ended")
        if len(self.asked) + n > session.limits.max_turns:
            self.refuse(403, "max_turns")
        turn = Turn(next(self._requests), parent, suffix, room, n, stop)
        task = asyncio.create_task(session.answer(turn))
        session.running.add(task)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise TurnRefused(403, "closed", "the trajectory has ended")
            answers = task.result()
        finally:
            session.running.discard(task)
        session.notes.refusal = None
        if is_delivered:
            session.notes.delivered |= {answer.node for answer in answers}
        self.asked += answers
        return answers

    def refuse(self, status: int, code: str) -> None:
        self.session.notes.refusal = code
        if code != "context_length_exceeded" and not self.session.limit.done():
            self.session.limit.set_result(code)
        raise TurnRefused(status, code, "no more")


class ScriptedPool:
    """Runs agents as coroutines. `ended`: how many have ended, in whichever way."""

    agent: Agent

    def __init__(self, *_: Any) -> None:
        self.tasks: list[AgentTask] = []
        self.num_ended = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        assert self.num_ended == len(self.tasks), "an agent is still at work"

    async def run(self, task: AgentTask, model: Any, timeout_s: float) -> Outcome:
        self.tasks.append(task)
        try:
            return await type(self).agent(task, model)
        except (AgentFailure, asyncio.CancelledError):
            raise
        except Exception as error:
            raise AgentFailure(f"exception: {type(error).__name__}: {error}") from error
        finally:
            self.num_ended += 1


def pool_of(agent: Agent) -> type[ScriptedPool]:
    return type("Pool", (ScriptedPool,), {"agent": staticmethod(agent)})


def agents_of(agent: Agent, **keys: Any) -> Agents:
    """Agents of this function."""
    return Agents(AgentConfig(enable=True, **keys), ScriptedGateways(), pool_of(agent)())  # type: ignore[arg-type]


@contextmanager
def controllers_agents(monkeypatch: Any, agent: Agent) -> Iterator[SimpleNamespace]:
    """Controllers have stand-ins of this function; `.made` has them."""
    made = SimpleNamespace(gateways=[], pools=[])

    def noted(kind: list, make: Callable) -> Callable:
        return lambda *args: kind.append(make(*args)) or kind[-1]

    with monkeypatch.context() as patch:
        patch.setattr("megatron_dapo.rollout.build_rollout.Gateways", noted(made.gateways, ScriptedGateways))
        patch.setattr("megatron_dapo.rollout.build_rollout.AgentPool", noted(made.pools, pool_of(agent)))
        yield made


MAX_RESPONSE = 12


class Servers:
    """A pool of one server. `answer`: of the request's tokens and parameters; may raise."""

    def __init__(self, answer=None):
        self.version, self.cache_salt, self.is_aborting = 1, "salt", False
        self.asked, self.salts, self.preferred, self.questions = [], [], [], []
        self.answer = answer or (lambda tokens, params: (10, 11))
        self.slot_s = 0.0
        self.url = "url"

    @asynccontextmanager
    async def slot(self, avoid, prefer, is_first):
        self.preferred.append(prefer)
        await asyncio.sleep(self.slot_s)
        yield self

    def mark_behind(self, server, reason):
        """It stays."""

    async def generate(self, tokens, params, timeout_s, oldest, salt, experts, answer):
        self.asked.append((tokens.tolist(), params))
        self.questions.append(experts)
        self.salts.append(salt)
        written = self.answer(tokens.tolist(), params)
        if asyncio.iscoroutine(written):
            written = await written
        if isinstance(written, Generation):
            return written
        reason = "length" if len(written) >= params.max_new_tokens else "stop"
        return Generation(written, (-0.5,) * len(written), reason, (1,) * len(written), servers=("url",))


class Rewards:
    """Notes the texts that it scores."""

    scores_groups = False

    def __init__(self):
        self.texts = []

    async def score(self, source, text, *_):
        self.texts.append(text)
        return RewardResult(0.25, False)


class Words:
    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, np.asarray(tokens).tolist()))


class Played:
    """A group of one response or more, with all that took part."""

    def __init__(
        self, agent, answer=None, n=1, servers=None, is_validation=False, slot_s=0.0, routers=None, rewards=None, **keys
    ):
        (group,) = synthetic_groups(64, num_groups=1)
        self.drawn = replace(group, samples=(), version=1)
        self.servers, self.rewards = servers or Servers(answer), rewards or Rewards()
        self.servers.slot_s = slot_s
        self.agent, self.n, self.keys, self.is_validation = agent, n, keys, is_validation
        self.routers = routers
        self.group: Group = asyncio.run(self.play())

    async def play(self):
        self.agents = agents_of(self.agent, **{"end_timeout_s": 0.05, **self.keys})
        data = DataConfig(max_prompt_length=8)
        play = AgentPlay(self.agents, self.servers, Words(), data, self.is_validation).play
        keys = RolloutConfig(request_timeout_s=60.0, max_retries=1)
        sampler = Sampler(self.servers, self.rewards, Words(), keys, 64, play=play, seed=1, routers=self.routers)
        try:
            return await sampler.sample_group(self.drawn, self.n, SamplingParams(MAX_RESPONSE, temperature=0.5))
        finally:
            await self.agents.close()  # nothing is under way any more
            self.metrics = self.agents.metrics.take()

    @property
    def sample(self):
        (sample,) = self.group.samples
        return sample


async def two_turns(task, model):
    (first,) = await model.ask([1, 2])
    await model.ask([5], first.node)
    return Outcome(reward=1.0)

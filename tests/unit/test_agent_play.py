"""Trajectories of agents with scripted gateways and servers: turns, clocks, ends, verdicts."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.agents.agent_pool import AgentFailure
from megatron_dapo.agents.interface import Outcome
from megatron_dapo.agents.turns import COUNTS, TurnRefused
from megatron_dapo.common.places import Places
from megatron_dapo.common.rollout_errors import Aborted, NeedsSync, RolloutError
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Group
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.agent_metrics import AgentMetrics
from megatron_dapo.rollout.agent_play import AgentPlay, up_to_stop
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import Generation, SamplingParams
from tests.scripted_agents import agents_of
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

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

    def __init__(self, agent, answer=None, n=1, servers=None, is_validation=False, slot_s=0.0, routers=None, **keys):
        (group,) = synthetic_groups(64, num_groups=1)
        self.drawn = replace(group, samples=(), version=1)
        self.servers, self.rewards = servers or Servers(answer), Rewards()
        self.servers.slot_s = slot_s
        self.agent, self.n, self.keys, self.is_validation = agent, n, keys, is_validation
        self.routers = routers
        self.group: Group = asyncio.run(self.play())

    async def play(self):
        self.agents = agents_of(self.agent, **{"end_timeout_s": 0.05, **self.keys})
        data = DataConfig(max_prompt_length=8)
        play = AgentPlay(self.agents, self.servers, Words(), data, 64, self.is_validation).play
        keys = RolloutConfig(request_timeout_s=60.0, max_retries=0)
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


def test_the_turns_of_an_agent_are_a_sample():
    played = Played(two_turns)
    sample = played.sample
    assert sample.prompt_tokens.tolist() == [1, 2] and sample.response_tokens.tolist() == [10, 11, 5, 10, 11]
    assert sample.loss_mask.tolist() == [1, 1, 0, 1, 1] and sample.others == ()
    assert (sample.num_turns, sample.finish_reason, sample.is_terminated) == (2, "stop", True)
    assert (sample.raw_reward, sample.correct, sample.reward_error, sample.servers) == (1.0, True, None, ("url",))
    assert not played.rewards.texts
    assert [tokens for tokens, _ in played.servers.asked] == [[1, 2], [1, 2, 10, 11, 5]]
    assert {params.temperature for _, params in played.servers.asked} == {0.5}  # the run's
    assert played.servers.salts == ["salt"] * 2 and played.servers.preferred == [None, "url"]


def test_an_agent_is_told_its_task():
    tasks = []

    async def agent(task, model):
        tasks.append(task)
        return await two_turns(task, model)

    played = Played(agent, n=3)
    prompt = played.drawn.prompt
    assert sorted(task.number for task in tasks) == [0, 1, 2] and not any(task.is_validation for task in tasks)
    assert (tasks[0].prompt, tasks[0].ground_truth) == (prompt.text, prompt.ground_truth)
    assert tasks[0].messages == [{"role": "user", "content": prompt.messages}]
    validated = Played(agent, is_validation=True)
    assert tasks[-1].is_validation and validated.metrics["agent/num_restarts"] == 0
    assert "agent/tool_s" not in validated.metrics


def test_without_a_reward_the_function_scores_the_last_branch():
    async def agent(task, model):
        (first,) = await model.ask([1])
        await model.ask([2, 3])
        await model.ask([7], first.node)
        return Outcome()

    played = Played(agent)
    assert played.rewards.texts == ["10 11 7 10 11"] and played.sample.raw_reward == 0.25
    assert played.sample.prompt_tokens.tolist() == [2, 3]
    assert [branch.response_tokens.tolist() for branch in played.sample.others] == [[10, 11, 7, 10, 11]]


def test_a_posted_reward_counts_unless_the_agent_returns_one():
    async def agent(task, model):
        await model.ask([1])
        model.session.posted = Outcome(reward=0.5, correct=False, metrics={"steps": 3.0})
        return Outcome(reward=2.0) if task.number else Outcome(metrics={"files": 1.0})

    played = Played(agent, n=2)
    assert [(sample.raw_reward, sample.correct) for sample in played.group.samples] == [(0.5, False), (2.0, True)]
    assert (played.metrics["agent/steps"], played.metrics["agent/files"]) == (3.0, 1.0)


def test_choices_have_seeds_of_their_own_and_branches():
    async def agent(task, model):
        answers = await model.ask([1], n=3)
        assert [answer.node for answer in answers] == [0, 1, 2]
        return Outcome(reward=1.0)

    played = Played(agent)
    assert len({params.sampling_seed for _, params in played.servers.asked}) == 3
    assert len(played.sample.branches) == 3 and played.sample.num_turns == 3


def test_seeds_follow_from_the_conversation_not_from_the_order_of_requests():
    def seeds(order):
        async def agent(task, model):
            answers = {first: (await model.ask([first]))[0] for first in order}
            await asyncio.gather(*(model.ask([9], answers[first].node) for first in order))
            return Outcome(reward=1.0)

        return {tuple(tokens): params.sampling_seed for tokens, params in Played(agent).servers.asked}

    assert seeds([1, 2, 3]) == seeds([3, 1, 2]) and len({*seeds([1, 2, 3]).values()}) == 6


def test_each_branch_has_the_experts_of_all_its_tokens_but_the_last():
    """A server is asked for those behind the parent's; it tells the place of each token."""

    async def agent(task, model):
        (first,) = await model.ask([1, 2])
        await model.ask([5], first.node)
        await model.ask([6, 7], first.node)
        await model.ask([3])
        return Outcome(reward=1.0)

    def answer(tokens, params):
        start, end = servers.questions[-1].start, len(tokens) + 2 - 1
        experts = np.arange(start, end, dtype=np.uint8)
        return Generation((10, 11), (-0.5,) * 2, "stop", (1,) * 2, servers=("url",), routed_experts=experts)

    servers = Servers(answer)
    played = Played(agent, servers=servers, routers=object())
    assert [question.start for question in servers.questions] == [0, 3, 3, 0]
    for branch in played.sample.branches:
        num_tokens = len(branch.prompt_tokens) + len(branch.response_tokens)
        assert branch.routed_experts.tolist() == list(range(num_tokens - 1))


def test_the_agents_stop_strings_and_room_reach_the_server():
    async def agent(task, model):
        await model.ask([1], stop=("x", "y"), room=3)
        return Outcome(reward=1.0)

    ((_, params),) = Played(agent).servers.asked
    assert (params.stop, params.max_new_tokens) == (("x", "y"), 3)


def test_a_token_that_no_model_has_is_refused():
    refusals = []

    async def agent(task, model):
        for wrong in (64, -1, 2**70, True, 1.5):
            with pytest.raises(TurnRefused) as refusal:
                await model.ask([1, wrong])
            refusals.append((refusal.value.status, refusal.value.code))
        return await two_turns(task, model)

    assert Played(agent).sample.num_turns == 2
    assert refusals == [(400, "invalid_tokens")] * 5


def test_an_undelivered_answer_is_counted_and_not_trained_on():
    async def agent(task, model):
        await model.ask([1], is_delivered=False)
        await model.ask([1])
        await model.ask([1])
        return Outcome(reward=1.0)

    played = Played(agent)
    assert played.sample.num_turns == 1 and len(played.sample.branches) == 1
    assert (played.metrics["agent/num_tokens_undelivered"], played.metrics["agent/num_tokens_twins"]) == (2, 2)


# ------------------------------------------------------------------------------------------ the ends


def test_an_agent_that_outlives_its_time_is_refused_then_killed():
    seen = []

    async def agent(task, model):
        await model.ask([1])
        try:
            await asyncio.sleep(600)
        finally:
            seen.append(model.session.is_closed)

    played = Played(agent, timeout_s=0.05)
    assert seen == [True]
    assert (played.sample.finish_reason, played.sample.is_terminated) == ("time", False)
    assert played.rewards.texts == ["10 11"] and played.sample.reward_error is None
    assert len(played.agents.pool.tasks) == 1  # no restart


def test_after_its_time_an_agent_may_still_say_its_outcome():
    async def agent(task, model):
        (first,) = await model.ask([1])
        model.session.late = asyncio.create_task(model.ask([2], first.node))
        with pytest.raises(TurnRefused):  # the request ends
            await model.session.late
        with pytest.raises(TurnRefused):
            await model.ask([3])
        return Outcome(reward=1.0)

    async def late(tokens):
        if 2 in tokens:
            await asyncio.sleep(600)
        return (10, 11)

    played = Played(agent, lambda tokens, params: late(tokens), timeout_s=0.05, end_timeout_s=30.0)
    assert (played.sample.finish_reason, played.sample.raw_reward) == ("time", 1.0)


def test_a_time_out_without_an_answer_is_no_crash():
    async def agent(task, model):
        await asyncio.sleep(600)

    played = Played(agent, timeout_s=0.05)
    assert (played.sample.finish_reason, len(played.sample.response_tokens)) == ("time", 0)
    assert played.sample.prompt_tokens.tolist() == list(played.drawn.prompt.tokens)


def test_waiting_for_a_place_at_a_server_costs_no_time():
    played = Played(two_turns, timeout_s=0.3, slot_s=0.2)
    assert (played.sample.finish_reason, played.sample.num_turns) == ("stop", 2)


def test_the_clock_stands_still_while_one_of_several_requests_waits():
    async def agent(task, model):
        await asyncio.gather(*(model.ask([first]) for first in (1, 2)))
        return Outcome(reward=1.0)

    class OneFast(Servers):
        @asynccontextmanager
        async def slot(self, *_):
            if self.preferred:
                await asyncio.sleep(0.5)
            self.preferred.append(None)
            yield self

    async def slow():
        await asyncio.sleep(0.15)
        return (10, 11)

    played = Played(agent, servers=OneFast(lambda tokens, params: slow()), timeout_s=0.5)
    assert (played.sample.finish_reason, played.sample.num_turns) == ("stop", 2)


def test_time_at_a_server_counts():
    async def slow():
        await asyncio.sleep(600)

    played = Played(two_turns, lambda tokens, params: slow(), timeout_s=0.1)
    assert played.sample.finish_reason == "time"


@pytest.mark.parametrize("dies", [True, False])
def test_an_agent_ends_with_its_turns_whether_it_dies_of_the_refusal_or_goes_on_asking(dies):
    async def agent(task, model):
        while True:
            try:
                await model.ask([1])
            except TurnRefused:
                if dies:
                    raise
                await asyncio.sleep(0.005)

    played = Played(agent, max_turns=2)
    assert (played.sample.finish_reason, played.sample.reward_error) == ("turns", None)
    assert len(played.agents.pool.tasks) == 1 and len(played.servers.asked) == 2


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_full_branch_ends_an_agent_only_if_it_does_not_go_on(goes_on):
    async def agent(task, model):
        await model.ask([1])
        try:
            model.refuse(400, "context_length_exceeded")
        except TurnRefused:
            if not goes_on:
                raise
        await model.ask([2])  # compacted
        return Outcome(reward=1.0)

    sample = Played(agent).sample
    assert sample.finish_reason == ("stop" if goes_on else "length")
    assert sample.raw_reward == (1.0 if goes_on else 0.25)


def test_an_answer_cut_by_the_end_of_its_branch_is_truncated():
    async def agent(task, model):
        await model.ask([1], room=MAX_RESPONSE)
        return Outcome(reward=1.0)

    sample = Played(agent, lambda tokens, params: (10,) * MAX_RESPONSE).sample
    assert (sample.finish_reason, sample.is_truncated, sample.raw_reward) == ("length", True, 1.0)


def test_an_answer_cut_by_the_agents_own_limit_is_not_truncated():
    async def agent(task, model):
        await model.ask([1], room=2)
        return Outcome(reward=1.0)

    assert Played(agent).sample.finish_reason == "stop"


# -------------------------------------------------------------------------------------- the failures


def test_a_crashed_agent_begins_anew_with_other_seeds():
    tries = []

    async def agent(task, model):
        await model.ask([1])
        tries.append(task.number)
        if len(tries) == 1:
            raise ValueError("scripted")
        return Outcome(reward=1.0)

    played = Played(agent)
    assert played.sample.raw_reward == 1.0 and played.sample.response_tokens.tolist() == [10, 11]
    first, second = (params.sampling_seed for _, params in played.servers.asked)
    assert first != second
    assert (played.metrics["agent/num_restarts"], played.metrics["agent/num_tokens_lost"]) == (1, 2)


async def raises(task, model):
    await model.ask([1])
    raise ValueError("scripted")


async def asks_nothing(task, model):
    return Outcome(reward=1.0)


async def loses_its_gateway(task, model):
    await model.ask([1])
    model.session.lost.set()
    await asyncio.sleep(600)


async def dies(task, model):
    await model.ask([1], is_delivered=False)
    raise AgentFailure("crash: scripted")


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        (raises, "agent: exception: ValueError: scripted"),
        (asks_nothing, "agent: crash: it ended without having read an answer of the model"),
        (loses_its_gateway, "agent: crash: its gateway has ended"),
        (dies, "agent: crash: scripted"),
    ],
)
def test_an_agent_that_fails_again_and_again_has_no_verdict_and_its_group_is_complete(agent, error):
    async def mixed(task, model):
        return await (agent if task.number == 1 else two_turns)(task, model)

    played = Played(mixed, n=3, max_restarts=2)
    failed = played.group.samples[1]
    assert failed.reward_error == error
    assert (failed.finish_reason, failed.correct, failed.reward, failed.is_terminated) == ("agent", False, 0.0, False)
    assert len(failed.response_tokens) == 0 and failed.branches == (failed,)
    assert [sample.reward_error for sample in played.group.samples] == [None, error, None]
    assert len(played.agents.pool.tasks) == 2 + 3 and played.metrics["agent/num_restarts"] == 2


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(NeedsSync("scripted"), NeedsSync), (RolloutError("scripted"), RolloutError)],
)
def test_lost_servers_end_the_agent_and_reach_the_sampler(raised, seen):
    ends = []

    async def agent(task, model):
        try:
            with pytest.raises(TurnRefused):
                await model.ask([1])
            await asyncio.sleep(600)
        finally:
            ends.append(task.number)

    class Lost(Servers):
        @asynccontextmanager
        async def slot(self, *_):
            raise raised
            yield

    with pytest.raises(seen):
        Played(agent, servers=Lost())
    assert ends == [0]


def test_a_stop_ends_the_agent():
    def aborted(tokens, params):
        return Generation((10, 11), (-0.5,) * 2, "abort", (1, 1), servers=("url",))

    servers = Servers(aborted)
    servers.is_aborting = True
    with pytest.raises(Aborted):
        Played(two_turns, servers=servers)


def test_cancelling_waits_for_the_agents_end():
    async def scenario():
        began, ends = asyncio.Event(), []

        async def agent(task, model):
            began.set()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.02)
                ends.append(task.number)

        played = Played.__new__(Played)
        (group,) = synthetic_groups(64, num_groups=1)
        played.drawn = replace(group, samples=(), version=1)
        played.servers, played.rewards, played.n, played.is_validation = Servers(), Rewards(), 1, False
        played.agent, played.keys, played.routers = agent, {}, None
        task = asyncio.create_task(played.play())
        await began.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() and ends == [0]

    asyncio.run(scenario())


# --------------------------------------------------------------------------------- places and metrics


def test_no_more_trajectories_are_open_than_there_are_places():
    async def agent(task, model):
        await asyncio.sleep(0.02)
        return await two_turns(task, model)

    played = Played(agent, n=7, max_open=2)
    assert len(played.group.samples) == 7 and played.agents.gateways.most_open == 2


def test_places_count_those_who_wait():
    async def scenario():
        places, freed, release = Places(2), [], asyncio.Event()
        places.on_free = lambda: freed.append(places.num_free)

        async def hold():
            async with places.taken():
                await release.wait()

        holders = [asyncio.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0)
        assert places.num_free == 0
        holders[2].cancel()
        await asyncio.wait({holders[2]})
        assert places.num_free == 0
        release.set()
        await asyncio.wait({*holders[:2]})
        assert places.num_free == 2 and freed == [0, 1, 2]

    asyncio.run(scenario())


def test_metrics_of_agents_are_numbers_with_plain_names_and_few():
    metrics = AgentMetrics()
    wild = {"ok": 1, "nan": float("nan"), "": 1.0, "a b": 1.0, "x" * 49: 1.0, "text": "1", "tool_s": 9.0, "é": 1.0}
    metrics.add(1.0, {**wild, "is_good": True})
    metrics.add(3.0, {"ok": 3.0, "huge": 2**2000} | {f"n{number}": 1.0 for number in range(1000)})
    taken = metrics.take()
    assert (taken["agent/ok"], taken["agent/tool_s"], taken["agent/is_good"]) == (2.0, 2.0, 1.0)
    own = {name for name in taken if not name.startswith("agent/num_")}
    assert len(own) == 33 and {*own} >= {"agent/n0"} and "agent/huge" not in own
    assert "agent/ok" not in metrics.take()


def test_each_count_of_a_gateway_has_a_metric():
    metrics = AgentMetrics()
    metrics.count(dict.fromkeys(COUNTS, 3))
    assert {f"agent/num_{name}": 3 for name in COUNTS}.items() <= metrics.take().items()


def test_time_in_tools_is_time_without_a_request():
    async def agent(task, model):
        (first,) = await model.ask([1])
        await asyncio.sleep(0.1)
        await model.ask([2], first.node)
        return Outcome(reward=1.0, error="scripted")

    async def slow():
        await asyncio.sleep(0.2)
        return (10, 11)

    began = time.monotonic()
    played = Played(agent, lambda tokens, params: slow())
    assert 0.1 <= played.metrics["agent/tool_s"] <= time.monotonic() - began - 0.4 + 0.01
    assert played.metrics["agent/num_errors"] == 1


def test_an_answer_of_several_servers_ends_at_its_first_stop_text():
    """The stop text `1 2` lies over the border of the parts, which no server could see."""
    tokens = (5, 1, 2, 3, 1, 2, 7)
    experts = np.arange(2 * (4 + 7 - 1), dtype=np.uint8)  # two per token, of four tokens read before
    whole = Generation(tokens, (-0.5,) * 7, "length", (1,) * 7, routed_experts=experts)
    cut = up_to_stop(whole, ("9", "1 2"), 4, Words().decode)
    assert cut.tokens.tolist() == [5, 1, 2] and cut.finish_reason == "stop"
    assert len(cut.log_probs) == len(cut.weight_versions) == 3
    assert cut.routed_experts.tolist() == list(range(2 * (4 + 3 - 1)))
    assert up_to_stop(whole, ("9",), 4, Words().decode) is whole

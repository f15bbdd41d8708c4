"""Ends of agents with scripted gateways and servers: clocks, limits, failures, restarts."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from megatron_dapo.agents.agent_pool import AgentFailure
from megatron_dapo.agents.interface import Outcome
from megatron_dapo.agents.turns import TurnRefused
from megatron_dapo.common.rollout_errors import Aborted, NeedsSync, RolloutError
from megatron_dapo.servers.client import FOREIGN_VERSION, Generation
from megatron_dapo.servers.server_error import ServerError
from tests.scripted_agents import MAX_RESPONSE, Played, Rewards, Servers, two_turns
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize("failure", ["error", "nonsense", "weights of nobody"])
def test_a_request_without_an_answer_to_take_costs_no_time(failure):
    async def failing(tokens):
        if len(played) == 1:
            played.append("again")
            await asyncio.sleep(0.35)
            if failure == "error":
                raise ServerError("url", "/generate", 500, "scripted")
            log_prob, version = (-1e30, 1) if failure == "nonsense" else (-0.5, FOREIGN_VERSION)
            return Generation((10, 11), (log_prob,) * 2, "stop", (version,) * 2, servers=("url",))
        await asyncio.sleep(0.12)
        return (10, 11)

    played = ["first"]
    sample = Played(two_turns, lambda tokens, params: failing(tokens), timeout_s=0.5).sample
    assert (sample.finish_reason, sample.num_turns) == ("stop", 2)


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


async def hides_a_refusal(task, model):
    with suppress(TurnRefused):
        model.refuse(404, "model_not_found")
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
        (
            hides_a_refusal,
            "agent: crash: it ended without having read an answer of the model; its last request was refused: "
            "model_not_found",
        ),
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

"""Trajectories of agents with scripted gateways and servers: turns, verdicts, places, metrics."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.agents.turns import COUNTS
from megatron_dapo.common.places import Places
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.agent_metrics import AgentMetrics
from megatron_dapo.servers.client import Generation
from tests.scripted_agents import Played, Rewards, Servers, two_turns

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize("is_posted", [False, True])
def test_without_a_reward_the_function_scores_the_agents_own_answer(is_posted):
    async def agent(task, model):
        await model.ask([1])
        said = Outcome(answer="a patch")
        model.session.posted = said if is_posted else Outcome(answer="an earlier one")
        return Outcome() if is_posted else said

    played = Played(agent)
    assert played.rewards.texts == ["a patch"] and played.sample.raw_reward == 0.25


def test_a_reward_by_any_way_comes_before_an_answer():
    async def agent(task, model):
        await model.ask([1])
        model.session.posted = Outcome(reward=0.5)
        return Outcome(answer="a patch")

    played = Played(agent)
    assert played.rewards.texts == [] and played.sample.raw_reward == 0.5


def test_a_function_of_groups_scores_own_answers_also_those_from_before_a_stop():
    async def agent(task, model):
        await model.ask([1])
        return Outcome(answer=f"patch {task.number}")

    seen = []

    class OfGroups(Rewards):
        scores_groups = True

        async def score_group(self, source, texts, *_):
            seen.append(list(texts))
            return [RewardResult(0.25, False) for _ in texts]

    played = Played(agent, n=3, max_open=1, rewards=OfGroups())  # fewer places than responses
    played.drawn = replace(played.drawn, samples=played.group.samples[:1])
    asyncio.run(played.play())
    assert seen == [["patch 0", "patch 1", "patch 2"]] * 2


def test_a_turn_goes_to_the_server_of_its_branch_and_a_new_one_to_the_last():
    async def agent(task, model):
        (first,) = await model.ask([1])
        await model.ask([2])
        await model.ask([3], first.node)
        await model.ask([4])
        return Outcome(reward=1.0)

    def answer(tokens, params):
        url = "b" if tokens[0] == 2 else "a"
        return Generation((10,), (-0.5,), "stop", (1,), servers=(url,))

    played = Played(agent, answer)
    assert played.servers.preferred == [None, "a", "a", "a"] and played.sample.servers == ("a", "b")


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


def test_an_undelivered_answer_is_counted_and_not_trained_on():
    async def agent(task, model):
        await model.ask([1], is_delivered=False)
        await model.ask([1])
        await model.ask([1])
        return Outcome(reward=1.0)

    played = Played(agent)
    assert played.sample.num_turns == 1 and len(played.sample.branches) == 1
    assert (played.metrics["agent/num_tokens_undelivered"], played.metrics["agent/num_tokens_twins"]) == (2, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_tokens_of_a_request_that_nobody_waits_for_are_counted(fails):
    """One of two choices was written to its end, the other one in part, with four tokens that an
    earlier server wrote."""

    class Slow(Servers):
        async def generate(self, tokens, params, timeout_s, oldest, salt, experts, answer):
            if tokens == [2] and len(self.asked) == 2:
                try:
                    await asyncio.Event().wait()
                finally:
                    answer.parts = Generation((1, 2, 3, 4), (-0.5,) * 4, "abort", (1,) * 4)
                    answer.num_given_up = 3
            return await super().generate(tokens, params, timeout_s, oldest, salt, experts, answer)

    async def agent(task, model):
        await model.ask([1])
        asking = asyncio.create_task(model.ask([2], n=2))
        asking.add_done_callback(lambda ended: ended.exception())  # refused
        while len(played_by.asked) < 2:
            await asyncio.sleep(0)
        if fails:
            raise ValueError("scripted")
        for request in model.session.running:
            request.cancel()
        await asyncio.wait({asking})
        return Outcome(reward=1.0)

    played_by = Slow()
    played = Played(agent, servers=played_by, max_restarts=0)
    name = "lost" if fails else "undelivered"
    counts = {each: played.metrics[f"agent/num_tokens_{each}"] for each in ("lost", "undelivered", "twins")}
    assert counts == {"lost": 0, "undelivered": 0, "twins": 0} | {name: 2 * fails + 2 + 4 + 3}
    assert played.sample.num_written_tokens == 2 * (not fails)


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
    wild = {"ok": 1, "nan": float("nan"), "": 1.0, "a b": 1.0, "x" * 49: 1.0, "text": "1", "é": 1.0}
    metrics.add({}, {**wild, "is_good": True, "tool_s": 1.0})
    metrics.add({}, {"ok": 3.0, "huge": 2**2000} | {f"n{number}": 1.0 for number in range(1000)} | {"tool_s": 3.0})
    taken = metrics.take()
    assert (taken["agent/ok"], taken["agent/tool_s"], taken["agent/is_good"]) == (2.0, 2.0, 1.0)
    own = {name for name in taken if not name.startswith("agent/num_")}
    assert len(own) == 33 and {*own} >= {"agent/n0"} and "agent/huge" not in own
    assert "agent/ok" not in metrics.take()


def test_each_count_of_a_gateway_has_a_metric():
    metrics = AgentMetrics()
    metrics.add(dict.fromkeys(COUNTS, 3))
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

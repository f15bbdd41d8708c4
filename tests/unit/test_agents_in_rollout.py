"""An agent's turns under pools and rewards of the run: moves between servers, cached prefixes, the
punishment of long answers."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.algorithm import OverlongRewardShapingConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.rewards.shaping import shape
from megatron_dapo.rollout.agent_play import AgentPlay
from megatron_dapo.rollout.sampling import Sampler
from tests.fake_rollout import WORDS, WritingServer, until
from tests.scripted_agents import agents_of
from tests.unit.test_moves import names
from tests.unit.test_pushes_in_flight import AllRight, Words, check_labels, draw, rollout, sample

pytestmark = pytest.mark.unit

NEXT = WORDS.index("p9")


def sampler_of(agent, pool, **more):
    play = AgentPlay(agents_of(agent), pool, Words(), DataConfig(max_prompt_length=8)).play
    return Sampler(pool, AllRight(), Words(), RolloutConfig(request_timeout_s=30.0), len(WORDS), play=play, **more)


async def two_turns(task, model):
    (first,) = await model.ask([WORDS.index(task.prompt)], room=60)
    await model.ask([NEXT], first.node, room=60)
    return Outcome(reward=1.0)


def test_a_turn_moves_within_and_the_next_one_is_asked_where_it_ended():
    async def scenario():
        first, second = servers = [WritingServer(lambda: 60), WritingServer(lambda: 25)]
        async with rollout(*servers, keeps_caches=True) as (pool, _):
            sampler = sampler_of(two_turns, pool)
            running = sample(sampler, draw(0, version=1), n=1)
            await first.until_written(1)
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            group = await running
        (one,) = group.samples
        (sent,), (again, later) = first.requests, second.requests
        number = first.num_written[sent["rid"]] - 1  # the last token is drawn anew
        assert number >= 4 and one.loss_mask.tolist() == [1] * (number + 25) + [0] + [1] * 25
        assert again["input_ids"] == [*sent["input_ids"], *one.response_tokens[:number].tolist()]
        assert later["input_ids"] == [*sent["input_ids"], *one.response_tokens[: number + 26].tolist()]
        assert {request["cache_salt"] for request in (sent, again, later)} == {sent["cache_salt"]}
        seeds = {request["sampling_params"]["sampling_seed"] for request in (sent, later)}
        assert len(seeds) == 2 and sampler.counts["moves"] == 1 and one.num_turns == 2
        check_labels([replace(group, samples=(branch_of_written(one),))])

    asyncio.run(scenario())


def branch_of_written(sample):
    """The written tokens alone: those that are read have no log-probs."""
    own = sample.loss_mask == 1
    names = ("response_tokens", "rollout_log_probs", "loss_mask", "weight_versions")
    return replace(sample, **{name: getattr(sample, name)[own] for name in names})


def test_an_answer_is_punished_for_its_longest_branch_wherever_that_stands():
    keys = OverlongRewardShapingConfig(enable=True, buffer_len=20, penalty_factor=1.0)
    shaping = partial(shape, keys=keys, max_response_length=30)
    lengths = {0: (5, 25), 1: (25, 5), 2: (5, 5)}

    async def agent(task, model):
        for place, length in enumerate(lengths[task.number]):
            await model.ask([WORDS.index(task.prompt), NEXT + place], room=length)
        return Outcome(reward=1.0)

    async def scenario():
        server = WritingServer(lambda: 60, token_s=0.001)
        async with rollout(server) as (pool, _):
            return await sample(sampler_of(agent, pool, shaping=shaping), draw(0, version=1), n=3, length=30)

    samples = asyncio.run(scenario()).samples
    assert [one.num_response_tokens for one in samples] == [25, 25, 5]
    assert [one.reward for one in samples] == [1.0 - 15 / 20] * 2 + [1.0]
    assert [one.raw_reward for one in samples] == [1.0] * 3


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_lost_server_costs_no_turn_and_no_agent_begins_anew(num_before):
    """It is lost in the first or in the second turn; the other server reads all tokens before it."""

    async def scenario():
        servers = [WritingServer(lambda: 20), WritingServer(lambda: 20)]
        async with rollout(*servers) as (pool, _):
            sampler = sampler_of(two_turns, pool)
            running = sample(sampler, draw(0, version=1), n=1)
            lost, other = servers
            await until(lambda: len(lost.requests) == num_before + 1)
            await until(lambda: bool(lost.num_written[lost.requests[-1]["rid"]]))
            await lost.stop()
            (one,) = (await running).samples
        assert len(other.requests) == 2 - num_before and one.num_turns == 2
        assert one.loss_mask.tolist() == [1] * 20 + [0] + [1] * 20 and one.reward_error is None
        assert other.requests[0]["input_ids"] == lost.requests[-1]["input_ids"]
        assert one.servers == ((lost.url, other.url) if num_before else (other.url,))

    asyncio.run(scenario())

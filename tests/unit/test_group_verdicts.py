"""Responses to one prompt scored together wait for each other, but never for a missing one."""

import asyncio

import pytest

from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.group_verdicts import GroupVerdicts
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import SamplingParams
from tests.fake_rollout import WORDS, WritingServer, until
from tests.unit.test_pushes_in_flight import AllRight, Words, draw, rollout

pytestmark = pytest.mark.unit


def test_all_are_scored_when_the_last_is_there_those_of_before_with_them():
    asked = []

    async def score(texts):
        asked.append(list(texts))
        return [RewardResult(float(len(text)), True) for text in texts]

    async def scenario():
        together = GroupVerdicts(score, {1: "before"}, num_new=3)
        first = asyncio.create_task(together.verdict(3, "a"))
        await asyncio.sleep(0)
        together.leave_out()  # the environment gave it a reward
        assert not asked
        return (await together.verdict(0, "bb")).score, (await first).score

    assert asyncio.run(scenario()) == (2.0, 1.0) and asked == [["bb", "before", "a"]]


def test_who_waits_is_told_why_another_does_not_come_and_a_cancelled_one_cancels_no_other():
    async def scenario():
        together = GroupVerdicts(AllRight().score, {}, num_new=3)
        first, second = (asyncio.create_task(together.verdict(number, text)) for number, text in enumerate("ab"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert not second.done()
        together.give_up(Aborted())
        with pytest.raises(Aborted):
            await second

    asyncio.run(scenario())


def test_a_response_that_waits_for_the_others_of_its_group_is_handed_back_when_they_are_aborted():
    """Its reward function scores all responses to a prompt together, and some do not come."""
    lengths = iter([5])

    class Together(AllRight):
        scores_groups = True

        async def score_group(self, *_):
            pytest.fail("not all responses are there")

    async def scenario():
        server = WritingServer(lambda: next(lengths, 60))
        async with rollout(server) as (pool, _):
            keys = RolloutConfig(request_timeout_s=30.0, max_retries=20)
            sampler = Sampler(pool, Together(), Words(), keys, len(WORDS))
            finished, partials = [], []
            running = asyncio.create_task(
                sampler.sample_group(draw(0, version=1), 3, SamplingParams(50), finished.append, partials.append)
            )
            await server.until_written(3)
            await until(lambda: server.num_open == 2)  # one is finished
            await pool.abort_requests(5.0)
            with pytest.raises(Aborted):
                await running
            assert not finished and sorted(len(partial.tokens) for partial in partials)[0] == 4 and len(partials) == 3

    asyncio.run(scenario())

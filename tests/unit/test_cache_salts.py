"""With pause_mode in_place servers keep their caches over a push:
salts decide the reuse of prefixes."""

import asyncio

import pytest

from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.rollout.trajectory import Budget
from megatron_dapo.servers.client import SamplingParams
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from tests.fake_rollout import WORDS, WritingServer
from tests.unit.test_pushes_in_flight import PROBE_S, AllRight, Words, check_labels, draw, rollout, sample, versions

pytestmark = pytest.mark.unit

NO_RETRIES = RolloutConfig(request_timeout_s=30.0, max_retries=0)


@pytest.mark.parametrize("keeps_caches", [True, False])
def test_a_salt_keeps_new_requests_from_prefixes_that_older_weights_read(keeps_caches):
    """A push in place does not flush. A trajectory keeps its first salt,
    and so its cached prefix."""

    async def scenario():
        server = WritingServer(lambda: 10)
        server.pause_mode = "in_place"
        async with rollout(server, keeps_caches=keeps_caches) as (pool, sampler):
            await sample(sampler, draw(0, version=1))
            budget = Budget()
            await sampler._generate(draw(0, version=1), (1,), SamplingParams(10), budget)
            await server.push(2)
            await pool.expect(2)
            await sample(sampler, draw(0, version=2))
            await sampler._generate(draw(0, version=1), (1, 2), SamplingParams(10), budget)
            salts = [request.get("cache_salt") for request in server.requests]
            old, new = (salts[0], salts[3]) if keeps_caches else (None, None)
            assert salts == [old, old, old, new, new, old] and (old != new or not keeps_caches)
            assert server.num_old_prefixes == (0 if keeps_caches else 2)

    asyncio.run(scenario())


def test_a_response_that_begins_between_a_push_and_expect_is_labelled_right_and_no_evaluation_meets_its_prefix():
    """In place. Its prompt is still in the cache as the old weights read it."""

    async def scenario():
        server = WritingServer(lambda: 10)
        server.pause_mode = "in_place"
        async with rollout(server, keeps_caches=True) as (pool, sampler):
            await sample(sampler, draw(0, version=1))
            await server.push(2)
            between = await sample(sampler, draw(0, version=1))
            # cached as the new weights read it, under the old salt
            unread = await sample(sampler, draw(1, version=1))
            assert server.num_old_prefixes == 2
            check_labels([between, unread])
            assert versions(between) == versions(unread) == [{2}] * 2
            await pool.expect(2)
            exact = Sampler(pool, AllRight(), Words(), NO_RETRIES, len(WORDS), exact=True)
            check_labels([await sample(exact, draw(number, version=2)) for number in (0, 1)])
            assert server.num_old_prefixes == 2

    asyncio.run(scenario())


def test_a_run_reads_no_prefix_that_another_run_left_at_the_same_version():
    """As after a resume from an earlier checkpoint, with servers that outlived the run before and
    its later weights."""

    async def scenario():
        server = WritingServer(lambda: 10)
        server.pause_mode = "in_place"
        async with rollout(server, keeps_caches=True) as (pool, sampler):
            await sample(sampler, draw(0, version=1))
            server.weights = 7.0  # another run's at version 1
            again = ServerPool(ServerList(urls=[server.url]), 64, 30.0, PROBE_S, keeps_caches=True)
            try:
                await again.start(10.0)
                await again.expect(1)
                await sample(Sampler(again, AllRight(), Words(), NO_RETRIES, len(WORDS)), draw(0, version=1))
            finally:
                await again.close()
            assert server.num_old_prefixes == 0

    asyncio.run(scenario())

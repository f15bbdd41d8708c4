"""Requests that survive a push of the weights: destinations, accepted parts, right labels."""

import asyncio
import random
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Aborted, NeedsSync, RolloutError
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.samples import Group, PartialResponse, Prompt
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import SamplingParams
from megatron_dapo.servers.server_health import ServerState
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.server_versions import require_in_flight_updates
from tests.fake_rollout import WORDS, WritingServer, mislabelled, until
from tests.proofs import amount

pytestmark = pytest.mark.unit

PROBE_S = 0.03
BEGUN = PartialResponse((2,) * 9, (-0.5,) * 9, (1,) * 9, ("http://one:1",))


class AllRight:
    """Gives every response a point."""

    scores_groups = False

    async def score(self, *_):
        return RewardResult(1.0, True)


class Words:
    def decode(self, tokens):
        return " ".join(WORDS[token] for token in tokens)


def draw(number, version):
    text = f"p{number}"
    prompt = Prompt(number, text, (WORDS.index(text),), text, "fake", "right")
    return Group(f"{number:08d}", prompt, version=version)


@asynccontextmanager
async def rollout(*servers, max_concurrency=64, exact=False, max_retries=20, **options):
    """(the pool of these servers, started, and a sampler of it), at version 1.
    options: further ones of the pool."""
    for server in servers:
        await server.start()
    pool = ServerPool(
        ServerList(urls=[server.url for server in servers]),
        max_concurrency,
        down_timeout_s=30.0,
        probe_interval_s=PROBE_S,
        **options,
    )
    try:
        await pool.start(10.0)
        await pool.expect(1)
        keys = RolloutConfig(request_timeout_s=30.0, max_retries=max_retries)
        yield pool, Sampler(pool, AllRight(), Words(), keys, len(WORDS), exact=exact)
    finally:
        await pool.close()
        for server in servers:
            await server.stop()


def sample(sampler, group, n=2, length=100, on_sample=lambda sample: None):
    return asyncio.create_task(sampler.sample_group(group, n, SamplingParams(length), on_sample))


def versions(group):
    return [set(sample.weight_versions) for sample in group.samples]


def check_labels(groups):
    for group in groups:
        for one in group.samples:
            assert not mislabelled(one), f"{group.uid}: {mislabelled(one)}"
            assert min(one.weight_versions) >= group.version


def test_a_response_that_a_push_interrupts_goes_on_and_each_token_bears_the_version_that_wrote_it():
    async def scenario():
        server = WritingServer(lambda: 40)
        async with rollout(server) as (pool, sampler):
            running = sample(sampler, draw(0, version=1))
            await server.until_written(2)
            await server.push(2)  # longer than a look at the server, which nobody told of it
            await asyncio.sleep(3 * PROBE_S)
            await pool.expect(2)
            group = await running
            assert len(server.requests) == 2 and not sampler.counts["retries"]
            assert versions(group) == [{1, 2}] * 2
            check_labels([group])

    asyncio.run(scenario())


def test_a_draw_of_the_new_version_takes_no_older_token():
    """Its server says that it has the version, and writes with the old weights once."""

    async def scenario():
        server = WritingServer(lambda: 10)
        async with rollout(server) as (pool, sampler):
            server.version = 1
            pool.version = 2  # as if the push had reached it
            with pytest.raises(NeedsSync):
                await sample(sampler, draw(0, version=2))
            assert pool.urls(ServerState.BEHIND) == [server.url]

    asyncio.run(scenario())


def test_an_evaluation_takes_no_token_of_another_version():
    async def scenario():
        server = WritingServer(lambda: 30)
        async with rollout(server, exact=True) as (pool, sampler):
            running = sample(sampler, draw(0, version=1))
            await server.until_written(2)
            await server.push(2)
            await pool.expect(2)
            group = await running
            assert versions(group) == [{2}] * 2 and len(server.requests) == 4

    asyncio.run(scenario())


def test_a_server_that_missed_a_push_finishes_what_it_has_and_gets_nothing_more():
    async def scenario():
        missed, pushed = WritingServer(lambda: 40), WritingServer(lambda: 40)
        async with rollout(missed, pushed) as (pool, sampler):
            old = sample(sampler, draw(0, version=1))
            await pushed.until_written(1)
            await missed.until_written(1)
            await pushed.push(2)
            await pool.expect(2)
            new = sample(sampler, draw(1, version=2), n=4)
            assert sorted(versions(await old), key=len) == [{1}, {1, 2}]
            assert versions(await new) == [{2}] * 4
            assert len(missed.requests) == 1 and len(pushed.requests) == 5 and not sampler.counts["retries"]

    asyncio.run(scenario())


def test_what_a_half_pushed_server_writes_is_not_taken_and_it_is_asked_again_after_the_next_push():
    async def scenario():
        half, whole = WritingServer(lambda: 60), WritingServer(lambda: 60)
        async with rollout(half, whole) as (pool, sampler):
            running = sample(sampler, draw(0, version=1))
            await until(lambda: half.num_open == whole.num_open == 1)
            await half.push(2, fails=True)
            await whole.push(2)
            # at the first look: 60 tokens take longer
            await until(lambda: len(whole.requests) == 2, 2.0)
            await pool.expect(2)
            group = await running
            check_labels([group])
            assert pool.urls(ServerState.BEHIND) == [half.url]
            await half.push(3)
            await whole.push(3)
            await pool.expect(3)
            check_labels([await sample(sampler, draw(1, version=3), n=4)])
            assert len(half.requests) == 3

    asyncio.run(scenario())


def test_finished_samples_of_a_group_are_told_of_at_once_and_not_sampled_again():
    async def scenario():
        lengths = iter([5, 500])
        server = WritingServer(lambda: next(lengths, 5))
        async with rollout(server) as (pool, sampler):
            finished = []
            running = sample(sampler, draw(0, version=1), length=500, on_sample=finished.append)
            await until(lambda: finished)
            running.cancel()
            await asyncio.wait({running})
            rest = draw(0, version=1)
            rest = Group(rest.uid, rest.prompt, tuple(finished), version=1)
            group = await sample(sampler, rest, n=3)
            assert [one.num_response_tokens for one in group.samples] == [5, 5, 5]
            assert group.samples[0] is finished[0] and len(server.requests) == 4

    asyncio.run(scenario())


def test_free_slots_are_those_of_current_servers_that_nobody_waits_for():
    async def scenario():
        servers = [WritingServer(lambda: 30), WritingServer(lambda: 30)]
        async with rollout(*servers, max_concurrency=4) as (pool, sampler):
            assert pool.num_free_slots == 8
            running = [sample(sampler, draw(0, version=1), n=5)]
            await until(lambda: sum(server.num_open for server in servers) == 5)
            assert pool.num_free_slots == 3
            running.append(sample(sampler, draw(1, version=1), n=5))
            await until(lambda: sum(server.num_open for server in servers) == 8)
            assert pool.num_free_slots == 0
            await asyncio.wait_for(pool.wait_for_slot_change(), 5.0)
            assert pool.num_free_slots <= 7, "two still wait, or one of them took the slot"
            await asyncio.gather(*running)
            assert pool.num_free_slots == 8
            change = asyncio.create_task(pool.wait_for_slot_change())
            await servers[0].stop()
            pool.mark_down(pool.servers[0], "scripted")
            await asyncio.wait_for(change, 1.0)
            assert pool.num_free_slots == 4

    asyncio.run(scenario())


def test_a_request_that_ends_while_it_is_woken_for_a_slot_leaves_the_slot_to_the_next():
    async def scenario():
        server = WritingServer(lambda: 10)
        async with rollout(server, max_concurrency=1) as (pool, _):
            async with pool.slot():
                waiting = [asyncio.create_task(hold(pool)) for _ in range(2)]
                await asyncio.sleep(0)
            waiting[0].cancel()  # woken, but not at work yet
            await asyncio.wait_for(waiting[1], 1.0)
            assert pool.num_free_slots == 1

    async def hold(pool):
        async with pool.slot():
            pass

    asyncio.run(scenario())


def test_aborted_responses_go_on_later_with_their_tokens_versions_and_log_probs():
    """By another sampler, as after a resume. Finished ones stay;
    those waiting for a slot have nothing yet."""
    lengths = iter([5])

    async def scenario():
        server = WritingServer(lambda: next(lengths, 60))
        async with rollout(server, max_concurrency=3) as (pool, sampler):
            finished, partials = [], []
            group = draw(0, version=1)
            running = asyncio.create_task(
                sampler.sample_group(group, 5, SamplingParams(50), finished.append, partials.append)
            )
            await until(lambda: len(server.requests) == 4)
            await server.until_written(3)
            await server.push(2)
            await server.until_written(3, num_tokens=12)
            await pool.abort_requests(5.0)
            with pytest.raises(Aborted):
                await running
            assert pool.num_free_slots == 3 and len(server.requests) == 4
            assert [len(one.response_tokens) for one in finished] == [5] and len(partials) == 3
            assert sorted(set(partials[0].weight_versions)) == [1, 2]
            num_tokens = [len(partial.tokens) for partial in partials]
            assert all(4 < number < 50 for number in num_tokens)

        resumed = WritingServer(lambda: 100, version=2)
        async with rollout(resumed) as (pool, sampler):
            await pool.expect(2)
            group = replace(group, samples=tuple(finished), partials=tuple(partials))
            group = await sampler.sample_group(group, 5, SamplingParams(50))
            assert group.partials == () and len(group.samples) == 5 and group.samples[0] is finished[0]
            # they are aborted in any order
            begun = {partial.number: partial for partial in partials}
            for one in group.samples[1:4]:
                partial = begun[one.number]
                number = len(partial.tokens)
                assert np.array_equal(one.response_tokens[:number], partial.tokens)
                assert one.weight_versions.tolist() == [*partial.weight_versions, *[2] * (50 - number)]
                assert np.array_equal(one.rollout_log_probs[:number], partial.log_probs)
                assert (one.finish_reason, one.num_turns, one.servers) == ("length", 1, (server.url, resumed.url))
            check_labels([group])
            asked = [(len(sent["input_ids"]), sent["sampling_params"]["max_new_tokens"]) for sent in resumed.requests]
            assert sorted(asked) == sorted([(1 + number, 50 - number) for number in num_tokens] + [(1, 50)])

    asyncio.run(scenario())


def test_a_partial_response_that_fills_a_smaller_limit_is_asked_for_no_more():
    async def scenario():
        server = WritingServer(lambda: 60)
        async with rollout(server) as (_, sampler):
            group = replace(draw(0, version=1), partials=(BEGUN,))
            group = await sampler.sample_group(group, 1, SamplingParams(7))
            (one,) = group.samples
            assert (one.response_tokens.tolist(), one.finish_reason, one.is_truncated) == ([2] * 7, "length", True)
            assert not server.requests

    asyncio.run(scenario())


def test_a_response_that_no_server_takes_leaves_the_others_of_its_group_to_finish():
    """Its server went stale while it waited for the slot that another one holds."""

    async def scenario():
        server = WritingServer(lambda: 30)
        async with rollout(server, max_concurrency=1) as (pool, sampler):
            finished = []
            running = sample(sampler, draw(0, version=1), on_sample=finished.append)
            await until(lambda: server.num_open == 1)
            pool.mark_behind(pool.servers[0], "scripted")
            with pytest.raises(NeedsSync):
                await running
            assert [one.num_response_tokens for one in finished] == [30] and len(server.requests) == 1

    asyncio.run(scenario())


async def partials_of(sampler, act, expected):
    """The partial responses handed on by a group that began with BEGUN,
    and ends as expected after `act`."""
    partials = []
    group = replace(draw(0, version=1), partials=(BEGUN,))
    running = asyncio.create_task(sampler.sample_group(group, 1, SamplingParams(50), on_partial=partials.append))
    await act(running)
    with pytest.raises(expected):
        await running
    return partials


@pytest.mark.parametrize("end", ["stale", "given up", "cancelled"])
def test_a_partial_response_that_cannot_go_on_is_handed_back(end):
    async def scenario():
        server = WritingServer(lambda: 60)
        async with rollout(server, max_retries=0) as (pool, sampler):

            async def act(running):
                if end == "stale":
                    return pool.mark_behind(pool.servers[0], "scripted")
                await until(lambda: server.num_open == 1)
                return running.cancel() if end == "cancelled" else pool.servers[0].drop_requests()

            expected = {"stale": NeedsSync, "given up": RolloutError, "cancelled": asyncio.CancelledError}[end]
            assert await partials_of(sampler, act, expected) == [BEGUN]

    asyncio.run(scenario())


def test_an_answer_that_waits_for_its_reward_when_it_is_cancelled_goes_on_later():
    """Without its last token, which ended it: that one is written anew."""

    asked = asyncio.Event()

    class Slow:
        scores_groups = False

        async def score(self, *_):
            asked.set()
            await asyncio.Event().wait()

    async def scenario():
        server = WritingServer(lambda: 10)
        async with rollout(server) as (pool, _):
            sampler = Sampler(pool, Slow(), Words(), RolloutConfig(request_timeout_s=30.0, max_retries=20), len(WORDS))

            async def act(running):
                await asked.wait()
                running.cancel()

            (partial,) = await partials_of(sampler, act, asyncio.CancelledError)
            assert partial.tokens.tolist() == [2] * 18 and partial.servers == ("http://one:1", server.url)
            assert len(partial.log_probs) == len(partial.weight_versions) == 18

    asyncio.run(scenario())


def test_a_frozen_server_keeps_no_request_on_its_way_to_another_from_being_aborted():
    """Its server has not heard of it when the first abort comes."""

    async def scenario():
        frozen, late = WritingServer(lambda: 1000), WritingServer(lambda: 1000)
        async with rollout(frozen, late) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), length=1000)
            await until(lambda: frozen.num_open == late.num_open == 1)
            is_known, abort = asyncio.Event(), pool.servers[1].client.abort

            async def from_the_second_on(request_id, timeout_s):
                if is_known.is_set():
                    await abort(request_id, timeout_s)
                is_known.set()

            pool.servers[0].client.abort = lambda request_id, timeout_s: asyncio.sleep(timeout_s)
            pool.servers[1].client.abort = from_the_second_on
            await pool.abort_requests(2.0)
            assert late.num_open == 0 and frozen.num_open == 1
            running.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.5.23", True), ("0.5.23.post1", True), ("0.6.0rc1", True), ("0.5.22.post9", False), (None, False)],
)
def test_a_server_that_cannot_be_pushed_to_while_it_generates_is_named_with_the_cure(version, is_taken):
    class Client:
        url = "http://one:1"

        async def server_info(self):
            return {"version": version}

    with (
        nullcontext() if is_taken else pytest.raises(UserError, match="SGLang .* of http://one:1 is too old; install 0")
    ):
        asyncio.run(require_in_flight_updates([Client()]))


def test_requests_have_ids_of_one_length_of_which_none_begins_another():
    """SGLang aborts every request with this beginning of its id."""

    async def scenario():
        server = WritingServer(lambda: 1)
        async with rollout(server) as (_, sampler):
            await sample(sampler, draw(0, version=1), n=12)
        ids = [request["rid"] for request in server.requests]
        assert len(set(ids)) == 12 and len({len(one) for one in ids}) == 1

    asyncio.run(scenario())


def test_pushes_and_losses_in_flight_leave_every_label_right():
    """Losses are closed sockets here; of processes that are killed:
    tests/e2e/test_elastic_servers.py."""
    lengths = random.Random(3)
    num_pushes = amount(12, 30)

    async def scenario():
        servers = [WritingServer(lambda: 1 + int(lengths.lognormvariate(2.5, 0.7)), token_s=0.004) for _ in range(3)]
        chance = random.Random(5)
        groups, version = {}, 1
        async with rollout(*servers, max_concurrency=8) as (pool, sampler):

            async def keep_full():
                running = set()
                while True:
                    while pool.num_free_slots and len(running) < 20 and not is_over:
                        number = len(groups)
                        groups[number] = None
                        task = asyncio.create_task(finish(number, draw(number % 150, version)))
                        running.add(task)
                        await asyncio.sleep(0)
                    done, running = await asyncio.wait(running, timeout=0.02) if running else (set(), running)
                    for task in done:
                        task.result()
                    if is_over and not running:
                        return
                    await asyncio.sleep(0.01)

            async def finish(number, group):
                while True:
                    try:
                        groups[number] = await sampler.sample_group(group, 3, SamplingParams(60))
                        return
                    except NeedsSync:
                        await asyncio.sleep(0.05)

            is_over = False
            filling = asyncio.create_task(keep_full())
            num_losses = 0
            for step in range(num_pushes):
                await asyncio.sleep(chance.uniform(0.02, 0.12))
                lost = chance.choice(servers) if step % 3 else None
                if lost is not None:
                    num_losses += 1
                    await lost.stop()
                alive = [server for server in servers if server is not lost]
                fails = chance.random() < 0.2
                await asyncio.gather(*(s.push(version + 1, fails=fails and s is alive[0]) for s in alive))
                if lost is not None:
                    lost.version, lost.weights = "default", 0.5
                    await lost.start()
                version += 1
                await pool.expect(version)
            is_over = True
            await asyncio.wait_for(asyncio.shield(filling), 60.0)
            assert num_losses == num_pushes * 2 // 3
            assert all(group is not None and len(group.samples) == 3 for group in groups.values())
            check_labels(groups.values())
            spanning = sum(len(set(s.weight_versions)) > 1 for g in groups.values() for s in g.samples)
            assert spanning > num_pushes, "responses went on over pushes"

    asyncio.run(scenario())

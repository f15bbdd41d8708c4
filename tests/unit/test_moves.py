"""Answers that go on at another server: nothing of them is lost, and their ends are as frequent."""

import asyncio
import math
import random

import numpy as np
import pytest

from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.samples import Group
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.rollout.trajectory import Budget
from megatron_dapo.servers.client import Generation, SamplingParams
from megatron_dapo.servers.growing_answer import GrowingAnswer
from megatron_dapo.servers.server_health import ServerState
from tests.fake_rollout import WORDS, WritingServer, until
from tests.proofs import amount, few
from tests.unit.test_pushes_in_flight import AllRight, Words, check_labels, draw, rollout, sample

pytestmark = pytest.mark.unit

LOOK_S = 0.15


@pytest.fixture
def short_looks(monkeypatch):
    """A look of so few steps measures."""
    monkeypatch.setattr("megatron_dapo.servers.speedometer._MIN_STEPS", 1)


def names(server):
    """The ids of a pool's server's requests."""
    return {request.name for _, request in server.requests_under_way()}


def num_written(servers):
    return sum(sum(server.num_written.values()) for server in servers)


def test_a_moved_answer_is_its_prefix_and_the_continuation_of_another_server():
    async def scenario():
        servers = [WritingServer(lambda: 60), WritingServer(lambda: 25)]
        async with rollout(*servers, keeps_caches=True) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1)
            first, second = servers
            await first.until_written(1)
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            group = await running
            (sent,), (again,) = first.requests, second.requests
            (one,) = group.samples
            number = first.num_written[sent["rid"]] - 1  # the last token is drawn anew
            assert number >= 4 and one.num_response_tokens == number + 25
            assert one.servers == (first.url, second.url) and one.num_turns == 1 and one.finish_reason == "stop"
            assert again["input_ids"] == [*sent["input_ids"], *one.response_tokens[:number].tolist()]
            assert again["sampling_params"] == {**sent["sampling_params"], "max_new_tokens": 100 - number}
            assert again["cache_salt"] == sent["cache_salt"] and again["rid"] != sent["rid"]
            assert sampler.counts["moves"] == 1 and not sampler.counts["retries"]
            check_labels([group])

    asyncio.run(scenario())


def test_tokens_of_several_weights_are_kept_with_their_versions():
    async def scenario():
        servers = [WritingServer(lambda: 100), WritingServer(lambda: 100)]
        async with rollout(*servers) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1, length=50)
            await servers[0].until_written(1)
            await asyncio.gather(*(server.push(2) for server in servers))
            await servers[0].until_written(1, num_tokens=15)
            await pool.expect(2)
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            group = await running
            assert set(group.samples[0].weight_versions) == {1, 2} and group.samples[0].num_response_tokens == 50
            assert group.samples[0].is_truncated and len(group.samples[0].servers) == 2
            check_labels([group])

    asyncio.run(scenario())


def test_a_request_that_nobody_waits_for_ends_at_its_server_which_tells_its_tokens():
    """A paused one writes none, and a silent one is not waited for."""

    async def given_up(server, pool, prepare):
        budget = Budget()
        server.requests.clear()
        asking = asyncio.create_task(sampler_of(pool)._generate(draw(0, version=1), (6,), SamplingParams(99), budget))
        await server.until_written(1)
        prepare()
        await asyncio.sleep(5 * server.token_s)  # a silent one writes its present token
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled() and not names(pool.servers[0])
        return budget.answer.num_given_up, server.num_written[server.requests[0]["rid"]]

    def sampler_of(pool):
        return Sampler(pool, AllRight(), Words(), RolloutConfig(), len(WORDS))

    async def scenario():
        server = WritingServer(lambda: 99)
        async with rollout(server) as (pool, _):
            count, written = await given_up(server, pool, lambda: None)
            assert 5 <= count == written < 99 and server.num_open == 0
            count, _ = await given_up(server, pool, lambda: setattr(server, "is_paused", True))
            assert count == 0 and server.num_open == 0
            server.is_paused = False
            count, _ = await given_up(server, pool, lambda: setattr(server, "slowness", math.inf))
            assert count == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_dapo.servers.server._GIVE_UP_S", 0.5)
        asyncio.run(scenario())


def test_a_request_of_a_paused_server_is_not_moved():
    """It would answer without a token, and begin anew."""

    async def scenario():
        server, other = WritingServer(lambda: 30), WritingServer(lambda: 30)
        async with rollout(server, other) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1)
            await server.until_written(1)
            server.is_paused = True
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            server.is_paused = False
            await running
            assert not sampler.counts["moves"] and not other.requests

    asyncio.run(scenario())


def test_a_server_that_fails_after_a_move_costs_its_own_tokens_only():
    async def scenario():
        servers = [WritingServer(lambda: 60) for _ in range(2)]
        async with rollout(*servers) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1)
            await servers[0].until_written(1)
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            await until(lambda: len(servers[1].requests) == 1)
            kept = len(servers[1].requests[0]["input_ids"])
            await servers[1].until_written(1)
            pool.servers[1].drop_requests()
            await running
            assert len(servers[0].requests[1]["input_ids"]) == kept > 4
            assert sampler.counts["moves"] == sampler.counts["retries"] == 1

    asyncio.run(scenario())


def test_a_stop_after_a_move_hands_on_what_all_servers_wrote():
    async def scenario(act, expected):
        servers = [WritingServer(lambda: 1000) for _ in range(2)]
        async with rollout(*servers) as (pool, sampler):
            partials = []
            params = SamplingParams(1000)
            running = asyncio.create_task(
                sampler.sample_group(draw(0, version=1), 1, params, on_partial=partials.append)
            )
            await servers[0].until_written(1)
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            await until(lambda: len(servers[1].requests) == 1)
            await servers[1].until_written(1)
            await act(pool, running)
            with pytest.raises(expected):
                await running
            (partial,) = partials
            kept = len(servers[1].requests[0]["input_ids"]) - 1
            return len(partial.tokens), kept, partial.servers == tuple(server.url for server in servers[:2])

    async def cancel(pool, running):
        running.cancel()

    async def abort(pool, running):
        await pool.abort_requests(5.0)

    length, kept, has_both = asyncio.run(scenario(abort, Aborted))
    assert length >= kept + 4 and has_both
    length, kept, _ = asyncio.run(scenario(cancel, asyncio.CancelledError))
    assert length == kept - 1  # a partial answer's last token is drawn anew


def test_an_evaluation_that_moves_forgets_tokens_of_older_weights():
    async def scenario():
        servers = [WritingServer(lambda: 30) for _ in range(2)]
        async with rollout(*servers, exact=True) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1)
            await servers[0].until_written(1)
            for server in servers:
                server.hold.clear()
            await pool.servers[0].move_requests(names(pool.servers[0]), 5.0)
            await until(lambda: len(servers[1].requests) == 1)
            await asyncio.gather(*(server.push(2) for server in servers))
            await pool.expect(2)
            group = await running
            assert set(group.samples[0].weight_versions) == {2}
            check_labels([group])

    asyncio.run(scenario())


def test_a_turn_of_a_dialogue_moves_and_keeps_its_experts_from_the_last_server():
    """The last server has read all: its answer has the choices for the whole text."""
    experts = np.arange(6, dtype=np.uint8)

    class Client:
        url = "http://one:1"

        def __init__(self):
            self.asked = []

        async def generate(self, tokens, params, timeout_s, request_id, salt, question):
            self.asked.append((list(tokens), params.max_new_tokens, question.start))
            if len(self.asked) == 1:
                return Generation((7, 8, 9), (-0.1, -0.2, -0.3), "abort", (1, 1, 1), servers=(self.url,))
            return Generation((5, 0), (-0.4, -0.5), "stop", (1, 1), servers=("http://two:1",), routed_experts=experts)

    class Pool:
        version, cache_salt, is_aborting = 1, None, False

        def slot(self, avoid, prefer, is_first):
            self.last = (prefer, is_first)
            return self

        async def __aenter__(self):
            return self.server

        async def __aexit__(self, *_):
            budget.answer.is_moving = True

    from megatron_dapo.servers.server import Server

    client, pool, budget = Client(), Pool(), Budget(num_routed=1)
    pool.server = Server(client)
    sampler = Sampler(pool, None, None, RolloutConfig(request_timeout_s=60.0, max_retries=0), 64, routers=object())

    async def scenario():
        asking = asyncio.create_task(sampler._generate(Group("uid", None), (1, 2), SamplingParams(9), budget))
        while not client.asked:
            budget.answer.is_moving = True
            await asyncio.sleep(0)
        return await asking

    real = client.generate

    async def generate(*arguments):
        budget.answer.is_moving = True  # the pool's mark
        return await real(*arguments)

    client.generate = generate
    whole = asyncio.run(scenario())
    assert client.asked == [([1, 2], 9, 1), ([1, 2, 7, 8], 7, 1)] and pool.last == (None, True)
    assert whole.tokens.tolist() == [7, 8, 5, 0] and whole.log_probs.tolist() == pytest.approx([-0.1, -0.2, -0.4, -0.5])
    assert whole.routed_experts is experts and whole.servers == ("http://one:1", "http://two:1")


def answers_with_moves(chance, num_answers, p_end, num_moves, move=GrowingAnswer.move):
    """The lengths of answers whose every token ends them with p_end, moved at given times."""
    lengths = []
    for _ in range(num_answers):
        answer, moments = GrowingAnswer(), sorted(chance.randrange(1, 40) for _ in range(num_moves))
        while True:
            room = moments.pop(0) - len(answer.tokens) if moments else 10_000
            if room <= 0:
                continue
            number = min(1 + int(math.log(1 - chance.random()) / math.log(1 - p_end)), 10_000)
            tokens = [1] * (number - 1) + [0]
            # an abort in the step of the last token: SGLang does not look whether it is an end
            is_aborted = number >= room < 10_000
            part = Generation(tokens[:room], [-0.5] * min(number, room), "abort", [1] * min(number, room))
            if not is_aborted:
                lengths.append(len(answer.tokens) + number)
                break
            move(answer, part, "url")
    return np.array(lengths)


def moved_whole(answer, part, _):
    """A move that goes on behind the last token too, also behind an end."""
    answer.parts = answer.whole(part)


def test_moved_answers_are_as_long_as_others():
    number = amount(20_000, 100_000)
    chance = random.Random(5)
    p_end = 1 / 30
    error = 3 * 30 / math.sqrt(number)  # a geometric length deviates by its mean
    for num_moves in (0, 1, 3):
        assert abs(answers_with_moves(chance, number, p_end, num_moves).mean() - 30) < error
    assert answers_with_moves(chance, number, p_end, 3, moved_whole).mean() > 30 + error


@pytest.mark.parametrize("slowness", few([4.0, 10.0], 1))
def test_a_slow_server_loses_requests_to_the_others_and_no_token_is_lost(slowness, short_looks):
    """Eight servers, one slow. While the run is blocked its requests go on elsewhere; then it is
    well again, and gets requests again."""
    chance = random.Random(3)

    async def scenario():
        servers = [WritingServer(lambda: chance.randrange(20, 60), token_s=0.01) for _ in range(8)]
        slow = servers[0]
        async with rollout(*servers, max_concurrency=8, look_s=LOOK_S) as (pool, sampler):
            pool.is_blocked = lambda: True
            groups, is_over = [], False

            async def keep_busy(number):
                while not is_over:
                    number += 40
                    groups.append(await sample(sampler, draw(number % 150, version=1), n=1))

            at_work = [asyncio.create_task(keep_busy(number)) for number in range(40)]
            await until(lambda: all(server.num_open for server in servers))
            slow.slowness = slowness
            await until(lambda: sampler.counts["moves"] >= 3)
            await until(lambda: pool.servers[0].factor > 0.7 * slowness)
            assert pool.servers[0].num_seats < 8 or slowness < 5
            slow.slowness = 1.0
            before = len(slow.requests)
            await until(lambda: pool.servers[0].num_seats == 8 and len(slow.requests) > before + 8)
            is_over = True
            await asyncio.gather(*at_work)
            check_labels(groups)
            trained = sum(one.num_response_tokens for group in groups for one in group.samples)
            assert not sampler.counts["retries"]
            # a move draws one token anew, if there is one
            assert trained <= num_written(servers) <= trained + sampler.counts["moves"]
            assert num_written(servers) > trained

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_server_that_answers_and_writes_nothing_is_given_up_and_comes_back():
    complaints = []

    async def scenario():
        servers = [WritingServer(lambda: 40) for _ in range(3)]
        silent = servers[0]
        async with rollout(*servers, look_s=LOOK_S, report_unresponsive=complaints.append) as (pool, sampler):
            running = [sample(sampler, draw(number, version=1), n=1) for number in range(6)]
            await until(lambda: all(server.num_open == 2 for server in servers))
            silent.slowness, silent.is_ill = math.inf, True
            groups = await asyncio.wait_for(asyncio.gather(*running), 60)
            check_labels(groups)
            assert pool.urls(ServerState.ILL) == [silent.url] and sampler.counts["retries"] == 2
            ((url, why),) = complaints[0].items()
            assert url == silent.url and "written nothing" in why
            silent.slowness, silent.is_ill = 1.0, False
            await until(lambda: len(pool.urls(ServerState.CURRENT)) == 3)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_silent_server_that_hands_its_requests_back_costs_no_token():
    """Its scheduler hears aborts, and schedules nothing."""

    class Idle(WritingServer):
        async def _step(self):
            while math.isinf(self.slowness) and not any(event.is_set() for event in self._aborted.values()):
                await asyncio.sleep(self.token_s)
            await asyncio.sleep(self.token_s) if math.isinf(self.slowness) else await super()._step()

    async def scenario():
        silent, other = Idle(lambda: 60), WritingServer(lambda: 20)
        async with rollout(silent, other, look_s=LOOK_S) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1)
            await silent.until_written(1)
            silent.slowness = math.inf
            group = await asyncio.wait_for(running, 60)
            assert sampler.counts["moves"] == 1 and not sampler.counts["retries"]
            assert len(group.samples[0].servers) == 2
            check_labels([group])

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_equal_servers_move_nothing(short_looks):
    chance = random.Random(2)

    async def scenario():
        servers = [WritingServer(lambda: chance.randrange(10, 60)) for _ in range(4)]
        async with rollout(*servers, max_concurrency=4, look_s=LOOK_S) as (pool, sampler):
            pool.is_blocked = lambda: True
            await asyncio.gather(*(sample(sampler, draw(number, version=1), n=4) for number in range(20)))
            assert any(server.speedometer.factor for server in pool.servers)
            assert not sampler.counts["moves"] and not pool.take_speeds()["rollout/servers_slow"]

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_environment_that_waits_holds_no_slot():
    from types import SimpleNamespace

    from megatron_dapo.config.schema.multi_turn import MultiTurnConfig
    from megatron_dapo.envs.environment import Observation
    from megatron_dapo.rollout.trajectory import MultiTurn

    async def scenario():
        server = WritingServer(lambda: 5)
        async with rollout(server, max_concurrency=1) as (pool, sampler):
            asked, answers = asyncio.Event(), asyncio.Event()

            class Environment:
                async def reset(self, task):
                    return Observation()

                async def step(self, response):
                    asked.set()
                    await answers.wait()
                    return Observation(done=True, reward=1.0)

                async def __aenter__(self):
                    return self

                async def __aexit__(self, *_):
                    pass

            pool_of_environments = SimpleNamespace(session=lambda seed: Environment())
            keys = MultiTurnConfig(enable=True, max_turns=3, timeout_s=60.0)
            turns = MultiTurn(pool_of_environments, Words(), None, keys)
            playing = Sampler(pool, AllRight(), Words(), sampler._keys, len(WORDS), play=turns.play)
            running = sample(playing, draw(0, version=1), n=1)
            await asked.wait()
            assert pool.in_flight() == {} and pool.num_free_slots == 1
            answers.set()
            assert (await running).samples[0].num_turns == 1

    asyncio.run(scenario())

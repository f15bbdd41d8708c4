"""Speeds from counters of work, seats and picks by speed; equal servers are picked as ever."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_dapo.rollout.step_metrics import restart_metrics
from megatron_dapo.servers.fleet import TOKEN_TIME
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_health import ServerEvent, ServerState
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.server_slots import ServerSlots
from megatron_dapo.servers.speedometer import Load, Speedometer, WorkDone
from megatron_dapo.telemetry.console import warnings_of
from tests.fake_rollout import PLACES

pytestmark = pytest.mark.unit


class Counters:
    """A server's counters, as SGLang adds them up step by step."""

    def __init__(self):
        self.moments = [0.0] * 6
        self.num_read = 0

    def steps(self, number, num_requests, step_s):
        microseconds = 1e6 * step_s
        for _ in range(number):
            part = (1, num_requests, microseconds, num_requests**2, num_requests * microseconds, num_requests)
            self.moments = [before + more for before, more in zip(self.moments, part, strict=True)]

    @property
    def load(self):
        counted = {"decode_moments": self.moments, "total_prefill_uncached_tokens": self.num_read}
        return {"num_used_tokens": 0, "max_total_num_tokens": 1, **PLACES, **counted}

    @property
    def work(self):
        return WorkDone.of([self.load])


def look(meter, counters, usual=None, has_requests=True, has_old_ones=True):
    meter.note(counters.work)
    meter.look(usual, has_requests=has_requests, has_old_ones=has_old_ones)


@pytest.mark.parametrize("slowness", [1.0, 4.0])
def test_a_factor_tells_the_pace_whatever_the_number_of_requests(slowness):
    """Steps of 30 ms with 24 requests: by the model twice as slow as a usual server with none."""
    counters, meter = Counters(), Speedometer()
    look(meter, counters)
    counters.steps(100, 24, 0.030 * slowness)
    look(meter, counters)
    assert meter.factor == pytest.approx(slowness * 0.030 / (66 + 24))
    counters.steps(60, 114, 0.060 * slowness)  # twice as many requests, counted by the same model
    look(meter, counters, usual=meter.factor)
    assert meter.factor == pytest.approx(slowness * 0.030 / 90)


def test_replicas_behind_one_url_are_added_up_and_who_does_not_count_is_not_measured():
    first, second = Counters(), Counters()
    first.steps(10, 4, 0.02)
    second.steps(30, 8, 0.02)
    work = Load.of({"loads": [first.load, second.load]}).work
    assert (work.num_steps, work.num_requests, work.num_tokens) == (40, 280, 280)
    assert work.seconds == pytest.approx(0.8)
    uncounted = {"num_used_tokens": 1, "max_total_num_tokens": 4, "num_running_reqs": 3, "max_running_requests": 6}
    assert Load.of({"loads": [uncounted]}) == Load(0.25, 0.5, None)
    # before its first step
    assert WorkDone.of([{**first.load, "decode_moments": None}]).num_steps == 0


@pytest.mark.parametrize("name", [*PLACES, "num_used_tokens", "max_total_num_tokens"])
def test_a_load_without_one_of_its_fields_is_no_load(name):
    """A field with a new name must not read as 0."""
    load = Counters().load
    del load[name]
    with pytest.raises(KeyError, match=name):
        Load.of({"loads": [load]})


def test_a_server_that_began_anew_is_not_measured_across_its_start():
    counters, meter = Counters(), Speedometer()
    look(meter, counters)
    counters.steps(100, 10, 0.02)
    look(meter, counters)
    factor = meter.factor
    again = Counters()
    again.steps(70, 10, 0.08)
    look(meter, again)
    assert meter.factor == factor and meter.num_silent == 0


def test_only_a_server_that_stands_still_under_old_requests_is_silent():
    counters, meter = Counters(), Speedometer()
    for _ in range(5):
        look(meter, counters)  # before its first step it may compile
    assert meter.num_silent == 0
    counters.steps(1, 10, 0.02)
    look(meter, counters)
    look(meter, counters, has_old_ones=False)
    assert meter.num_silent == 0
    for number in (1, 2):
        look(meter, counters)
        assert meter.num_silent == number
    meter.look(None, has_requests=True, has_old_ones=True)  # its counters could not be read
    assert meter.num_silent == 2
    counters.num_read += 1  # it reads a long prompt
    look(meter, counters)
    assert meter.num_silent == 0
    look(meter, counters)
    look(meter, counters, has_requests=False, has_old_ones=False)
    assert meter.num_silent == 0


def test_a_factor_rests_on_many_steps_of_which_one_may_hold_a_prompt():
    """Ten steps in a look; the first one of all reads a prompt for 1.5 s."""
    counters, meter = Counters(), Speedometer()
    look(meter, counters)
    for number in range(5):
        assert meter.factor is None
        counters.steps(10, 24, 0.030)
        counters.moments[2] += 1.5e6 * (number == 0)
        look(meter, counters)
        assert meter.num_silent == 0
    before = meter.factor
    assert before == pytest.approx((0.030 + 1.5 / 50) / 90)
    counters.steps(49, 24, 0.300)
    look(meter, counters)
    assert meter.factor == before
    counters.steps(1, 24, 0.300)
    look(meter, counters)
    assert meter.factor == pytest.approx((before + 0.300 / 90) / 2)


def test_an_idle_server_is_taken_for_a_little_more_usual_at_each_look():
    counters, meter = Counters(), Speedometer()
    look(meter, counters)
    counters.steps(60, 10, 0.2)
    look(meter, counters)
    slow = meter.factor
    meter.look(slow / 10, has_requests=False, has_old_ones=False)
    assert meter.factor == pytest.approx(0.9 * slow + 0.1 * slow / 10)


def slots_of(num_servers, most):
    """Current servers without a network."""
    slots = ServerSlots(most)
    slots.version = 1
    for number in range(num_servers):
        client = SimpleNamespace(url=f"http://s{number}:1")
        slots.servers.append(Server(client, state=ServerState.CURRENT, num_seats=most))
    return slots


def test_equal_servers_are_picked_by_the_fewest_requests_as_without_speeds():
    """10,000 picks and ends, with failures and servers that have a prefix: the rule of before the
    factors, written out here."""
    chance = random.Random(1)
    slots = slots_of(5, 6)

    async def scenario():
        for server in slots.servers:  # measured, within the noise of equal servers
            server.speedometer.factor = chance.uniform(0.96, 1.04)
        slots._give_seats()
        held = []
        for _ in range(10_000):
            avoid = {server.url for server in slots.servers if chance.random() < 0.1}
            prefer = chance.choice([None, *slots.servers])
            prefer = prefer and prefer.url
            free = [server for server in slots.servers if server.num_in_flight < 6]
            if free and chance.random() < 0.6:
                old = min(free, key=lambda s: (s.url in avoid, s.url != prefer, s.num_in_flight))
                slot = slots.slot(avoid, prefer)
                assert await slot.__aenter__() is old
                held.append(slot)
            elif held:
                await held.pop(chance.randrange(len(held))).__aexit__(None, None, None)
        assert slots.take_speeds()["rollout/servers_slow"] == 0

    asyncio.run(scenario())


def test_a_slow_server_gets_the_seats_of_its_speed_and_no_turn_returns_to_it():
    slots = slots_of(3, 128)
    slow = slots.servers[2]

    async def scenario():
        for server, factor in zip(slots.servers, (0.01, 0.01, 0.04), strict=True):
            server.speedometer.factor = factor
        slots._give_seats()
        # a token on its last seat takes twice as long as on a full usual server
        assert TOKEN_TIME.token_s(4.0, slow.num_seats) <= 2 * TOKEN_TIME.token_s(1.0, 128)
        assert TOKEN_TIME.token_s(4.0, slow.num_seats + 1) > 2 * TOKEN_TIME.token_s(1.0, 128)
        assert slots.num_free_slots == 128 + 128 + slow.num_seats
        picked: Counter = Counter()
        for _ in range(200):
            picked[(await slots.slot(prefer=slow.url).__aenter__()).url] += 1
        assert abs(picked["http://s0:1"] - picked["http://s1:1"]) <= 1 and not picked[slow.url]
        metrics = slots.take_speeds()
        assert metrics["rollout/server_factor_max"] == pytest.approx(4.0) and metrics["rollout/servers_slow"] == 0
        assert metrics["rollout/seats/s2:1"] == slow.num_seats

    asyncio.run(scenario())


def test_a_drained_server_is_told_of_once_and_the_console_names_it_and_its_factor(caplog):
    slots = slots_of(3, 128)

    async def scenario():
        for server, factor in zip(slots.servers, (0.01, 0.01, 0.1), strict=True):
            server.speedometer.factor = factor
        for _ in range(3):
            slots._give_seats()
        assert [server.num_seats for server in slots.servers] == [128, 128, 0]
        return slots.take_speeds()

    metrics = asyncio.run(scenario())
    assert metrics["rollout/servers_slow"] == 1
    assert len(caplog.messages) == 1 and "http://s2:1 takes 10.0 times as long" in caplog.text
    warned = {metric: words for metric, words in warnings_of(metrics) if words}
    assert list(warned) == ["rollout/seats/s2:1"] and "s2:1 takes 10.0 times" in warned["rollout/seats/s2:1"]
    assert not any(words for _, words in warnings_of({**metrics, "rollout/seats/s2:1": 3.0}))


def test_a_moved_request_is_before_all_that_wait():
    slots = slots_of(1, 1)
    order = []

    async def take(name, is_first=False):
        async with slots.slot(is_first=is_first):
            order.append(name)

    async def scenario():
        async with slots.slot():
            waiting = [asyncio.create_task(take("new")), asyncio.create_task(take("newer"))]
            await asyncio.sleep(0)
            waiting.append(asyncio.create_task(take("moved", is_first=True)))
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        assert order == ["moved", "new", "newer"]

    asyncio.run(scenario())


def drained(slots):
    """Seats for three servers, the last one ten times as slow."""
    for server, factor in zip(slots.servers, (0.01, 0.01, 0.1), strict=True):
        server.speedometer.factor = factor
    slots._give_seats()
    assert [server.num_seats for server in slots.servers] == [128, 128, 0]


def test_the_maxima_of_a_step_begin_with_what_the_step_before_left():
    async def scenario():
        slots = slots_of(3, 128)
        drained(slots)
        for _ in range(2):
            metrics = slots.take_speeds()
            assert metrics["rollout/servers_slow"] == 1
            assert metrics["rollout/server_factor_max"] == pytest.approx(10.0)

    asyncio.run(scenario())


def test_the_last_servers_have_seats_at_once_however_slow_they_are():
    async def scenario():
        slots = slots_of(3, 128)
        drained(slots)
        first, second, slow = slots.servers
        slots.mark_behind(first, "scripted")
        slots.mark_down(second, "scripted")
        assert slots.num_free_slots == slow.num_seats == 128
        slots._note(first, ServerEvent.READY)
        assert slots.num_free_slots == 128 and not slow.num_seats, "its measured speed is known"

    asyncio.run(scenario())


def test_a_lost_server_comes_back_as_one_that_was_never_measured():
    async def scenario():
        slots = slots_of(3, 128)
        drained(slots)
        slow = slots.servers[2]
        slots.mark_down(slow, "scripted")
        slots._note(slow, ServerEvent.READY)
        assert slow.speedometer.factor is None and slow.factor == 1.0 and slow.num_seats == 128

    asyncio.run(scenario())


def pool_of(urls, **options):
    """A pool of these servers without a network."""
    return ServerPool(ServerList(urls=urls), 128, 1.0, 1.0, connect=lambda url: SimpleNamespace(url=url), **options)


def test_a_server_that_is_listed_again_was_never_measured():
    async def scenario():
        urls = ["http://s0:1", "http://s1:1"]
        pool = pool_of(urls)
        pool._take_list(urls)
        for server in pool.servers:
            server.state, server.speedometer.factor = ServerState.CURRENT, 0.01
        pool._take_list(urls[:1])
        pool._take_list(urls)
        assert [server.speedometer.factor for server in pool.servers] == [0.01, None]
        assert pool.urls(ServerState.DOWN) == urls[1:]

    asyncio.run(scenario())


def test_speeds_choose_no_server_for_a_turn_where_responses_are_to_be_reproduced():
    async def scenario():
        urls = [f"http://s{number}:1" for number in range(3)]
        pool = pool_of(urls, may_move=False)
        pool._take_list(urls)
        for server, factor in zip(pool.servers, (0.01, 0.01, 0.1), strict=True):
            server.state, server.speedometer.factor = ServerState.CURRENT, factor
        pool._give_seats()
        assert [server.num_seats for server in pool.servers] == [128] * 3
        async with pool.slot(prefer=urls[2]) as server:
            assert server.url == urls[2]

    asyncio.run(scenario())


def test_a_request_that_woke_in_vain_keeps_its_place_and_moved_ones_theirs():
    slots = slots_of(1, 1)
    order = []

    async def take(name, is_first=False):
        async with slots.slot(is_first=is_first):
            order.append(name)

    async def wait(name, is_first=False):
        task = asyncio.create_task(take(name, is_first))
        await asyncio.sleep(0)
        return task

    async def scenario():
        async with slots.slot():
            waiting = [await wait("first"), await wait("second")]
        async with slots.slot():  # taken before the woken request looks
            waiting += [await wait("third"), await wait("moved", True), await wait("moved later", True)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        assert order == ["moved", "moved later", "first", "second", "third"]

    asyncio.run(scenario())


def test_nobody_looks_for_a_slot_in_vain_while_no_seat_is_added(monkeypatch):
    slots = slots_of(2, 2)
    num_looks = 0

    def counted(self, *arguments, pick=ServerSlots._pick):
        nonlocal num_looks
        num_looks += 1
        return pick(self, *arguments)

    monkeypatch.setattr(ServerSlots, "_pick", counted)

    async def scenario():
        held = [slots.slot() for _ in range(4)]
        at = [await slot.__aenter__() for slot in held]
        waiting = [asyncio.create_task(slots.slot().__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        before = num_looks
        slots._give_seats()
        at[0].num_seats = 1  # a slow server with more requests than seats
        await held[0].__aexit__(None, None, None)
        await asyncio.sleep(0)
        assert num_looks == before and not any(task.done() for task in waiting)
        slots._give_seats()  # it has two seats again, and one of them is free
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1 and done.pop().result() is at[0]
        for task in waiting:
            task.cancel()

    asyncio.run(scenario())


def test_a_restart_costs_length_by_the_variance_over_the_mean():
    """Ten restarts in a million tokens; lengths of 1000 and 3000, alike often."""
    metrics = {"rollout/num_tokens": 1_000_000, "response_length/mean": 2000, "response_length/mean_square": 5_000_000}
    assert restart_metrics(metrics, 10) == {"rollout/restart_bias_bound": pytest.approx(1e-5 * 1_000_000 / 2000)}
    assert restart_metrics(metrics, 0) == {"rollout/restart_bias_bound": 0.0}
    assert restart_metrics({"rollout/num_tokens": 0}, 10) == {}

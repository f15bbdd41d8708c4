"""The filling of the queue, with a queue of its own and played servers: its ends and its counts."""

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest

from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.data.samples import PartialResponse, Prompt
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits
from megatron_dapo.rollout import filling
from megatron_dapo.rollout.filling import Filling

pytestmark = pytest.mark.unit


class Servers:
    """Slots held until the requests are aborted. obeys_aborts: requests end then;
    else nothing ends them."""

    version = 0
    is_aborting = False
    obeys_aborts = True

    def __init__(self, num_slots=8):
        self.num_slots = num_slots
        self.num_requests = 0
        self.change = asyncio.Event()
        self.aborted = asyncio.Event()

    @property
    def num_free_slots(self):
        return max(self.num_slots - self.num_requests, 0)

    def urls(self, state):
        return []

    async def wait_for_slot_change(self):
        await self.change.wait()
        self.change.clear()

    async def abort_requests(self, timeout_s):
        if self.obeys_aborts:
            self.aborted.set()

    async def hold(self, *_):
        self.num_requests += 1
        await self.aborted.wait()
        raise Aborted("as the test has it")


def make_filling(
    servers,
    sample_group,
    decide=lambda is_waited_for: None,
    num_responses=1,
    draw_s=0.0,
    max_staleness=4,
    **options,
):
    queue = GroupQueue(QueueLimits(8, 8, 10, max_staleness=max_staleness), lambda samples: None)
    queue.begin(1, 0)

    def next_prompt():
        time.sleep(draw_s)
        return Prompt(0, "key", (1,), "p", "test", "0"), None

    drawing = SimpleNamespace(queue=queue, decide=decide, next_prompt=next_prompt)
    return Filling(drawing, servers, sample_group, num_responses, **options), queue


async def begun(sampling):
    """A `fill` that has started all that it may."""
    task = asyncio.create_task(sampling.fill())
    await asyncio.sleep(0.1)
    return task


async def ended(task):
    task.cancel()
    await asyncio.wait({task})


def test_open_groups_beyond_the_bound_cost_one_question_a_turn(monkeypatch):
    """Of a state without samples, 60 are open behind the 40 places; each turn asks for the first of
    them, and for a new draw only with a free slot."""

    async def scenario():
        servers = Servers(num_slots=10)
        sampling, queue = make_filling(servers, servers.hold)
        for _ in range(100):
            queue.draw(Prompt(0, "key", (1,), "p", "test", "0"), 0)
        task = await begun(sampling)
        assert servers.num_requests == 40 and queue.num_open == 100
        asked, may_start = [], queue.may_start
        monkeypatch.setattr(queue, "may_start", lambda *words: asked.append(words[0]) or may_start(*words))
        sampling._go_on()
        assert asked == [40]
        servers.num_slots = 50
        sampling._go_on()
        assert asked == [40, 40, 100] and queue.num_open == 100
        assert sampling._held.is_on
        await ended(task)

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_staleness", "num_groups"), [(0, 8), (1, 16)])
def test_slow_requests_block_the_run_once_a_slot_is_free_and_nothing_may_be_drawn(max_staleness, num_groups):
    """With max_staleness 0 that is the end of a wave."""

    async def scenario():
        servers = Servers(num_slots=num_groups)
        sampling, queue = make_filling(servers, servers.hold, max_staleness=max_staleness)
        assert not servers.is_blocked(), "nothing is asked for"
        task = await begun(sampling)
        assert queue.num_open == servers.num_requests == num_groups and not servers.is_blocked()
        servers.num_slots += 1
        assert servers.is_blocked()
        await ended(task)

    asyncio.run(scenario())


@pytest.mark.parametrize(("has_baseline", "num_groups"), [(False, 4), (True, 3)])
def test_slots_are_not_given_twice_while_requests_begin_slowly(has_baseline, num_groups):
    """20 ms of each draw hold up the event loop; a greedy baseline is a request too."""

    async def scenario():
        servers = Servers(num_slots=8)

        async def sample_group(*_):
            await asyncio.gather(*(asyncio.create_task(servers.hold()) for _ in range(2 + has_baseline)))

        sampling, queue = make_filling(servers, sample_group, num_responses=2, draw_s=0.02, has_baseline=has_baseline)
        task = asyncio.create_task(sampling.fill())
        await asyncio.sleep(1.0)
        assert queue.num_open == num_groups and servers.num_requests == num_groups * (2 + has_baseline)
        await ended(task)

    asyncio.run(scenario())


def test_a_failed_decision_ends_what_is_under_way_and_the_queue_takes_in_none_of_it():
    """The queue was put back before: it does not know these groups any more,
    or has their samples to come."""

    async def scenario():
        servers = Servers(num_slots=2)
        part = PartialResponse((5,), (-0.5,), (0,), ("url",))
        is_broken = False

        async def sample_group(group, on_sample, on_partial):
            try:
                await servers.hold()
            finally:
                on_sample(SimpleNamespace(uid=group.uid))
                on_partial(part)

        def decide(is_waited_for):
            if is_broken:
                raise ValueError("too few verdicts")

        sampling, queue = make_filling(servers, sample_group, decide)
        first = await begun(sampling)
        is_broken = True
        with pytest.raises(ValueError, match="too few verdicts"):
            await sampling.fill()
        assert queue.num_open == 2 and not sampling._tasks
        assert not any(group.samples or group.partials for group in queue.open_groups)
        await ended(first)

    asyncio.run(scenario())


def test_a_group_that_is_cancelled_before_it_begins_is_sampled_by_the_next_call():
    async def scenario():
        servers = Servers(num_slots=1)
        sampling, queue = make_filling(servers, servers.hold)
        sampling._start(queue.draw(Prompt(0, "key", (1,), "p", "test", "0"), 0))
        await sampling.cancel()
        await asyncio.sleep(0)
        assert servers.num_requests == 0 and queue.num_open == 1
        task = await begun(sampling)
        assert servers.num_requests == 1 and queue.num_open == 1
        await ended(task)

    asyncio.run(scenario())


def test_a_failure_before_a_stop_is_told_of_by_the_stop():
    async def scenario():
        servers = Servers(num_slots=1)
        sampling, _ = make_filling(servers, servers.hold)
        task = await begun(sampling)
        failure = ValueError("as the test has it")
        sampling._failure = failure
        task.cancel()
        await asyncio.wait({task})
        assert await sampling.halt() is failure
        with pytest.raises(ValueError, match="as the test has it"):
            await sampling.fill()
        assert await sampling.halt() is None

    asyncio.run(scenario())


def test_a_stop_says_how_many_groups_it_does_not_wait_for(monkeypatch, caplog):
    monkeypatch.setattr(filling, "_ABORT_S", 0.1)

    async def scenario():
        servers = Servers(num_slots=3)
        servers.obeys_aborts = False
        sampling, _ = make_filling(servers, servers.hold)
        task = await begun(sampling)
        with caplog.at_level(logging.WARNING):
            await sampling.halt()
        assert "3 groups are not waited for any more" in caplog.text
        await ended(task)

    asyncio.run(scenario())

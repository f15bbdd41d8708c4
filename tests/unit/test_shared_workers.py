"""Calls side by side in a process that ends: the culprit is found,
and the others do not queue up."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from megatron_dapo.rewards.shared_workers import SharedWorkers
from megatron_dapo.rewards.worker_pool import WorkerLost

pytestmark = pytest.mark.unit


class Process:
    """Answers in rounds all requests so far; ends at a bad one among them."""

    def __init__(self, rounds):
        self._rounds = rounds
        self._requests = []
        self._answers = []

    def distrust(self):
        pass

    async def send(self, message):
        self._requests.append(message)

    async def receive(self):
        while not self._answers:
            for _ in range(10):  # until nobody else comes
                await asyncio.sleep(0)
            self._answers, self._requests = self._requests, []
            if self._answers:
                self._rounds.append(len(self._answers))
            if any(message["is_bad"] for message in self._answers):
                raise WorkerLost("ended")
        return {"id": self._answers.pop(0)["id"]}


class Pool:
    def __init__(self):
        self.rounds = []

    @asynccontextmanager
    async def worker(self):
        yield Process(self.rounds)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("bad", [{0}, {99}, {50}, {3, 40, 41}, {*range(100)}], ids=len)
def test_only_the_request_that_ends_its_process_has_no_verdict_and_others_stay_concurrent(bad, num_workers):
    async def scenario():
        pool = Pool()
        workers = SharedWorkers(pool, num_workers)
        calls = (workers.ask({"is_bad": number in bad}, 60.0) for number in range(100))
        replies = await asyncio.gather(*calls, return_exceptions=True)
        return replies, pool.rounds

    replies, rounds = asyncio.run(asyncio.wait_for(scenario(), 60.0))
    assert {number for number, reply in enumerate(replies) if isinstance(reply, WorkerLost)} == bad
    assert all(isinstance(reply, dict) for number, reply in enumerate(replies) if number not in bad)
    halvings = 7  # of 100
    assert len(rounds) <= 2 * halvings * len(bad) + 3, "one at a time would be 100"


def test_a_call_cancelled_among_waiting_suspects_holds_up_no_other():
    async def scenario():
        workers = SharedWorkers(Pool(), 1)
        calls = [asyncio.create_task(workers.ask({"is_bad": number == 1}, 60.0)) for number in range(4)]
        while not workers._num_suspects:
            await asyncio.sleep(0)
        calls[3].cancel()
        replies = await asyncio.gather(*calls, workers.ask({"is_bad": False}, 60.0), return_exceptions=True)
        return [type(reply) for reply in replies], workers._limits

    types, limits = asyncio.run(asyncio.wait_for(scenario(), 60.0))
    assert types[0] is types[2] is types[4] is dict and issubclass(types[1], WorkerLost)
    assert types[3] is asyncio.CancelledError and not limits

"""Requests that begin anew: each counts once, and only a server at fault is blamed."""

import asyncio
import math

import pytest

from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.samples import Group
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.rollout.trajectory import Budget
from megatron_dapo.servers.client import Generation, SamplingParams
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_error import ServerError
from tests.fake_rollout import WritingServer
from tests.unit.test_pushes_in_flight import draw, rollout, sample

pytestmark = pytest.mark.unit


def part(tokens, reason="abort", version=1):
    number = len(tokens)
    return Generation(tokens, (-0.5,) * number, reason, (version,) * number, servers=("http://one:1",))


MOVED, WHOLE = "moved", part((4, 5, 0), "stop")


class ScriptedPool:
    """One server with these answers in turn: errors, parts, or (MOVED, part)."""

    cache_salt, is_aborting, url = None, False, "http://one:1"

    def __init__(self, *answers):
        self.answers, self.version = list(answers), 1
        self.server, self.behind = Server(self), []

    def slot(self, *_):
        return self

    async def __aenter__(self):
        return self.server

    async def __aexit__(self, *_):
        pass

    def mark_down(self, server, reason):
        pass

    def mark_behind(self, server, reason):
        self.behind.append(reason)

    async def generate(self, *_):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            (request,) = self.server._requests.values()
            request.answer.is_moving = True
            self.version = answer[2] if len(answer) > 2 else self.version
            return answer[1]
        return answer


def generated(pool, monkeypatch, **options):
    monkeypatch.setattr("megatron_dapo.rollout.sampling._FIRST_PAUSE_S", 0.0)
    sampler = Sampler(pool, None, None, RolloutConfig(request_timeout_s=60.0, max_retries=3), 64, **options)
    group = Group("uid", None, version=1)
    return asyncio.run(sampler._generate(group, (1, 2), SamplingParams(9), Budget())), sampler.counts


@pytest.mark.parametrize(
    ("first", "num_restarts"),
    [
        (ServerError("http://one:1", "/generate", None, "lost"), 1),
        (part((7, 8, 9)), 1),  # aborted, but not by the pool
        (part((7, 99), "stop"), 1),  # no token of the model
        (part((7, 8, 9), "stop", version=0), 1),  # of older weights
        ((MOVED, part(())), 1),  # aborted in a pause
        ((MOVED, part((7,))), 1),  # the last token is not kept
        ((MOVED, part((7, 8, 9))), 0),
    ],
)
def test_a_request_that_loses_a_servers_tokens_counts_once_as_begun_anew(first, num_restarts, monkeypatch):
    pool = ScriptedPool(first, WHOLE)
    whole, counts = generated(pool, monkeypatch)
    assert whole.finish_reason == "stop" and counts["restarts"] == num_restarts
    assert list(whole.tokens)[-3:] == [4, 5, 0]


def test_a_server_that_wrote_nothing_is_not_blamed_for_another_servers_tokens(monkeypatch):
    """An evaluation: its kept tokens are of version 1, and the trainer's is 2 since."""
    pool = ScriptedPool((MOVED, part((7, 8, 9))), (MOVED, part(()), 2), part((4, 0), "stop", version=2))
    whole, counts = generated(pool, monkeypatch, exact=True)
    assert tuple(whole.tokens) == (4, 0) and not pool.behind and not counts["retries"] and counts["restarts"] == 1


def test_a_request_rests_after_a_move_that_failed_too():
    class Deaf(WritingServer):
        async def _abort(self, request):
            return await self._ready(request)

    async def scenario():
        server = Deaf(lambda: 60)
        async with rollout(server, WritingServer(lambda: 5)) as (pool, sampler):
            running = sample(sampler, draw(0, version=1), n=1)
            await server.until_written(1)
            ((_, before),) = pool.servers[0].requests_under_way()
            await pool.servers[0].move_requests({before.name}, 5.0)
            ((_, after),) = pool.servers[0].requests_under_way()
            assert before.moved_s == math.inf and after.moved_s < 60
            await running

    asyncio.run(scenario())

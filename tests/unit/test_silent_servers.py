"""Servers that answer and write nothing: which of them are given up, and which only wait."""

import asyncio
import math

import pytest
from aiohttp import web

from megatron_dapo.servers.server_health import ServerState
from tests.fake_rollout import WritingServer, until
from tests.unit.test_pushes_in_flight import check_labels, draw, rollout, sample

pytestmark = pytest.mark.unit

LOOK_S = 0.06
LOOKS = 40  # looks at a server's load, of which the pool reads one in two


class Checked(WritingServer):
    """Notes its health checks; `answers`: with what, if not as it is."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.num_checks, self.answers = 0, None

    async def _health(self, request):
        self.num_checks += 1
        if self.answers is not None:
            return web.json_response({}, status=await self.answers())
        return await super()._health(request)


async def at_work(servers, complaints, act, **options):
    """The states of the servers and the counts of the sampler, after requests that `act` meets."""
    options = {"look_s": LOOK_S, "report_unresponsive": complaints.append, **options}
    async with rollout(*servers, **options) as (pool, sampler):
        running = [sample(sampler, draw(number, version=1), n=2) for number in range(len(servers))]
        await until(lambda: all(server.num_open == 2 for server in servers))
        await act(pool)
        groups = await asyncio.wait_for(asyncio.gather(*running), 60)
        return groups, [server.state for server in pool.servers], sampler.counts


def test_a_server_that_others_left_paused_is_told_to_continue_and_not_called_ill(caplog):
    complaints = []
    servers = [Checked(lambda: 40) for _ in range(3)]

    async def act(pool):
        await servers[0].until_written(2)
        servers[0].is_paused = True
        await until(lambda: not servers[0].is_paused)

    groups, states, counts = asyncio.run(at_work(servers, complaints, act))
    check_labels(groups)
    assert states == [ServerState.CURRENT] * 3 and not counts["retries"] and not counts["restarts"]
    assert not complaints and "is ill" not in caplog.text and not servers[0].num_checks


@pytest.mark.parametrize(("push_s", "version"), [(600.0, 1), (0.0, 2)])
def test_a_server_that_may_be_in_a_push_is_left_alone(push_s, version):
    """Its push began later or lasts longer than the others'."""
    complaints = []
    servers = [Checked(lambda: 40) for _ in range(3)]

    async def act(pool):
        await servers[0].until_written(2)
        servers[0].is_paused, servers[0].version = True, version
        before = servers[0].num_looks
        await until(lambda: servers[0].num_looks > before + 1)  # the look during the pause's beginning is over
        num_checks = servers[0].num_checks
        await until(lambda: servers[0].num_looks > before + LOOKS)
        assert servers[0].num_checks == num_checks
        assert servers[0].is_paused and pool.urls(ServerState.CURRENT) == [server.url for server in servers]
        servers[0].is_paused = False

    _, _, counts = asyncio.run(at_work(servers, complaints, act, push_s=push_s))
    assert not complaints and not counts["retries"]


def test_a_silent_server_that_generates_when_asked_keeps_its_requests():
    """It reads a long prompt, or compiles."""
    complaints = []
    servers = [Checked(lambda: 40) for _ in range(3)]

    async def well():
        return 200

    async def act(pool):
        await servers[0].until_written(2)
        servers[0].slowness, servers[0].answers = math.inf, well
        await until(lambda: servers[0].num_checks >= 2)
        servers[0].slowness = 1.0

    _, states, counts = asyncio.run(at_work(servers, complaints, act))
    assert states == [ServerState.CURRENT] * 3 and not complaints
    assert not counts["retries"] and not counts["moves"]


def test_a_server_before_its_first_step_is_not_silent():
    """It compiles for its first requests."""
    complaints = []
    servers = [Checked(lambda: 40) for _ in range(3)]
    servers[0].slowness = math.inf

    async def act(pool):
        before = servers[0].num_looks
        await until(lambda: servers[0].num_looks > before + LOOKS)
        servers[0].slowness = 1.0

    _, _, counts = asyncio.run(at_work(servers, complaints, act))
    assert not complaints and not servers[0].num_checks and not counts["retries"]


def test_several_silent_servers_are_given_up_together():
    """The health check of each waits for the other's."""
    complaints = []
    servers = [Checked(lambda: 40) for _ in range(4)]
    silent = servers[:2]

    async def ill():
        await until(lambda: all(server.num_checks for server in silent))
        return 503

    async def act(pool):
        for server in silent:
            await server.until_written(2)
            server.answers = ill
        for server in silent:
            server.slowness = math.inf
        await until(lambda: len(pool.urls(ServerState.ILL)) == 2, timeout_s=8.0)  # less than one check may last
        assert len(complaints) == 2

    groups, _, _ = asyncio.run(at_work(servers, complaints, act))
    check_labels(groups)

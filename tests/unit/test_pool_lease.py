"""The controller and servers that sleep while the trainer has their GPUs."""

import asyncio

import pytest

from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.server_health import ServerState
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from tests.fake_rollout import needs_sync, until
from tests.unit.test_server_pool import STARTUP, num_servers, numbers, run

pytestmark = pytest.mark.unit

ON = "actor_rollout_ref.hybrid_engine=true"
CONTINUE = "/continue_generation"


@pytest.fixture
def lease(folder) -> LeaseFolder:
    return LeaseFolder(RunFolder(folder / "run").lease)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The routes of all questions to servers, in their order."""
    routes: list[str] = []
    original = SGLangClient._request

    async def noted(self, method, route, *arguments, **options):
        routes.append(str(route))
        return await original(self, method, route, *arguments, **options)

    monkeypatch.setattr(SGLangClient, "_request", noted)
    return routes


async def looks(pool, number: int) -> None:
    """Wait for that many rounds of the watches: all of them have the same interval."""
    num_reads = 0
    read = pool._listed.read_or_keep

    def counted():
        nonlocal num_reads
        num_reads += 1
        return read()

    pool._listed.read_or_keep = counted
    await until(lambda: num_reads >= number)
    pool._listed.read_or_keep = read


def test_sleeping_servers_are_asked_nothing_and_their_silence_is_no_loss(folder, lease, asked):
    async def scenario(controller, servers, listed):
        pool = controller._servers
        await controller.next_batch(1, 1)
        lease.write(Holder.MOVING)
        await looks(pool, 2)  # a question may have been under way
        asked.clear()
        lease.write(Holder.TRAINER)
        for server in servers:
            await server.stop()
        await looks(pool, 30)
        assert asked == [] and len(pool.urls(ServerState.CURRENT)) == 2
        for server in servers:
            await server.start()
            server.version = 2
        lease.write(Holder.SERVERS)
        batch = await controller.next_batch(2, 2)
        assert numbers(batch) == [4, 5, 6, 7] and num_servers(batch) == (2, 2)
        assert batch.metrics["rollout/num_retries"] == 0 and CONTINUE not in asked

    run(folder, scenario, overrides=[ON])


def test_the_time_asleep_does_not_count_for_servers_that_are_down(folder, lease):
    """Down before the sleep, they have the whole time for their start afterwards."""

    async def scenario(controller, servers, listed):
        (server,) = servers
        pool = controller._servers
        await controller.next_batch(1, 1)
        await server.stop()
        await until(lambda: pool.urls(ServerState.DOWN) and pool._all_down_since is not None)
        lease.write(Holder.TRAINER)
        await looks(pool, 30)  # 1.5 s or more
        assert pool._failure is None
        await server.start()
        lease.write(Holder.SERVERS)
        await until(lambda: pool.urls(ServerState.CURRENT))
        assert pool._failure is None and (await controller.next_batch(2, 1)).groups

    run(folder, scenario, num_servers=1, overrides=[ON, f"{STARTUP}=1.0"])


def test_a_question_that_straddles_the_sleep_counts_for_nothing(folder, lease, asked, monkeypatch):
    """Whether it is answered asleep, or never."""
    monkeypatch.setattr("megatron_dapo.servers.server_pool._PROBE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("megatron_dapo.servers.server_pool._MISSES", 1)

    async def scenario(controller, servers, listed):
        pool = controller._servers
        await controller.next_batch(1, 1)
        for server in servers:
            server.is_paused = server.is_frozen = True
        asked.clear()
        await until(lambda: asked.count("/ready") >= 2 and asked[-2:] == ["/model_info"] * 2)
        lease.write(Holder.MOVING)
        servers[0].is_frozen = False
        await looks(pool, 40)  # 2 s or more
        assert len(pool.urls(ServerState.CURRENT)) == 2
        assert not list(folder.rglob("unresponsive_servers/*"))

    run(folder, scenario, overrides=[ON])


@pytest.mark.parametrize("version", [1, 2])
def test_a_paused_server_is_behind_whatever_its_version_and_not_told_to_continue(folder, asked, version):
    async def scenario(controller, servers, listed):
        paused, other = servers
        paused.is_paused, paused.version = True, version
        assert await needs_sync(controller.next_batch(1, 1))
        batch = await controller.next_batch(1, 1)  # the push left it out
        assert numbers(batch) == [0, 1, 2, 3] and not paused.requests
        assert controller._servers.urls(ServerState.BEHIND) == [paused.url]
        assert paused.is_paused and CONTINUE not in asked
        paused.is_paused, paused.version = False, 1
        await until(lambda: len(controller._servers.urls(ServerState.CURRENT)) == 2)

    run(folder, scenario, overrides=[ON])


def test_the_requests_of_a_server_paused_at_work_go_to_the_others(folder, asked):
    async def scenario(controller, servers, listed):
        paused, other = servers
        paused.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: paused.num_open == 4)
        paused.is_paused = True
        batch = await asyncio.wait_for(pending, 20)
        assert numbers(batch) == [0, 1, 2, 3] and batch.metrics["rollout/num_retries"] == 4
        assert paused.is_paused and CONTINUE not in asked

    run(folder, scenario, overrides=[ON, "actor_rollout_ref.rollout.request_timeout_s=50.0"])


def test_a_step_whose_servers_are_all_paused_asks_for_a_push(folder):
    async def scenario(controller, servers, listed):
        for server in servers:
            server.is_paused = True
        assert await needs_sync(asyncio.wait_for(controller.next_batch(1, 1), 20))

    run(folder, scenario, overrides=[ON])

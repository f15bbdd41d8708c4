"""Servers that come and go under a working controller: requests by server,
no sample lost or doubled."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import RolloutError
from megatron_dapo.servers import running_means
from megatron_dapo.servers.server_health import ServerState
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from tests.fake_rollout import make_config, needs_sync, run_with_controller, until

pytestmark = pytest.mark.unit

STARTUP = "actor_rollout_ref.rollout.server.startup_timeout_s"
URLS_FILE = "actor_rollout_ref.rollout.server_urls_file"


def run(folder, scenario, num_servers=2, num_listed=None, overrides=()):
    """Runs `await scenario(controller, servers, listed)`;
    listed(servers) writes the watched file."""
    file = folder / "servers.txt"

    def listed(servers):
        file.write_text("".join(f"{server.url}\n" for server in servers))

    def config_for(servers):
        listed(servers[:num_listed])
        servers_from_file = ["actor_rollout_ref.rollout.server_urls=[]", f"{URLS_FILE}={file}"]
        return make_config(folder, [], *servers_from_file, *overrides)

    return run_with_controller(
        lambda controller, servers: scenario(controller, servers, listed), config_for, num_servers, timeout_s=60
    )


def numbers(batch):
    return [int(group.prompt.text[1:]) for group in batch.groups]


def num_servers(batch):
    return batch.metrics["rollout/num_servers"], batch.metrics["rollout/num_servers_current"]


def test_a_server_that_is_added_gets_the_weights_first_and_one_that_is_removed_finishes_what_it_has(folder):
    async def scenario(controller, servers, listed):
        old, new = servers
        new.version = "default"
        batch = await controller.next_batch(1, 1)
        assert num_servers(batch) == (1, 1)
        listed(servers)
        assert await needs_sync(controller.next_batch(2, 1))
        new.version = 1
        for server in servers:
            server.hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        await until(lambda: old.num_open == new.num_open == 4)
        listed([new])
        await asyncio.sleep(0.2)  # it is noticed: still the old one may answer
        for server in servers:
            server.hold.set()
        batch = await pending
        assert numbers(batch) == [4, 5, 6, 7] and batch.metrics["rollout/num_retries"] == 0
        num_requests = len(old.requests)
        await old.stop()
        assert numbers(await controller.next_batch(3, 1)) == [8, 9, 10, 11]
        assert len(old.requests) == num_requests, "it is asked no more"

    run(folder, scenario, num_listed=1)


def test_a_hanging_server_is_noticed_by_its_health_and_its_requests_are_sent_to_the_others(folder, monkeypatch):
    monkeypatch.setattr("megatron_dapo.servers.server_pool._PROBE_TIMEOUT_S", 0.1)
    overrides = ["actor_rollout_ref.rollout.request_timeout_s=50.0"]

    async def scenario(controller, servers, listed):
        frozen, other = servers
        await controller.next_batch(1, 1)
        frozen.hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        await until(lambda: frozen.num_open == 4)
        frozen.is_frozen = True
        batch = await asyncio.wait_for(pending, 20)
        assert numbers(batch) == [4, 5, 6, 7] and batch.metrics["rollout/num_retries"] == 4
        assert [note.name for note in folder.rglob("unresponsive_servers/*")] == [frozen.url[7:].replace(":", "_")]
        listed, current = num_servers(batch)
        assert listed == 2 and 1 <= current < 2
        assert set(frozen.script.num_answers.values()) == {2}, "what it had is not asked for twice"

        frozen.hold.set()
        frozen.is_frozen = False
        frozen.version = 0
        other.version = 2
        assert await needs_sync(controller.next_batch(3, 2))
        assert numbers(await controller.next_batch(3, 2)) == [8, 9, 10, 11], "a push that left it out holds up nobody"

    run(folder, scenario, overrides=overrides)


def test_a_restart_that_no_request_notices_is_noticed_by_the_version(folder):
    async def scenario(controller, servers, listed):
        restarted, other = servers
        restarted.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: restarted.num_open == 4)
        restarted.version = "default"  # behind a proxy that keeps the connections
        batch = await asyncio.wait_for(pending, 20)
        assert {v for g in batch.groups for s in g.samples for v in s.weight_versions} == {1}
        assert len(other.requests) == 8

    run(folder, scenario)


@pytest.mark.parametrize(
    ("used", "smallest", "largest"), [((75, 25), 0.25, 0.75), ((None, 25), 0.25, 0.25), ((None, None), None, None)]
)
def test_the_caches_of_servers_at_work_are_looked_at_and_who_cannot_tell_is_well(
    folder, caplog, used, smallest, largest
):
    async def scenario(controller, servers, listed):
        for server, tokens in zip(servers, used, strict=True):
            server.num_used_tokens = tokens
            server.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        # the first ones are answered
        await until(lambda: all(server.num_looks >= 2 for server in servers))
        for server in servers:
            server.hold.set()
        metrics = (await pending).metrics
        assert metrics.get("rollout/kv_used_max") == largest
        mean = metrics.get("rollout/kv_used_mean")
        assert mean == largest if smallest == largest else smallest < mean < largest

    run(folder, scenario)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_servers_wait_while_the_trainer_trains_and_while_others_have_the_requests(folder, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(running_means, "time", clock)

    async def scenario(controller, servers, listed):
        busy, other = servers
        await controller.next_batch(1, 1)
        clock.now += 30  # training
        busy.hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        await until(lambda: busy.num_open == 4 and other.num_open == 0 and len(other.requests) == 8)
        await until(lambda: list(controller._servers.in_flight().values()) == [4])  # its last answer was read
        clock.now += 10  # the last responses of the step
        await until(lambda: busy.num_looks >= 2)
        busy.num_looks = other.num_looks = 0
        await until(lambda: busy.num_looks >= 2)
        assert other.num_looks == 0, "the cache of a server without requests would only lower the mean"
        busy.hold.set()
        metrics = (await pending).metrics
        assert metrics["rollout/servers_waiting"] == (30 + 10 / 2) / 40
        assert metrics["rollout/slots_used"] == 4 / controller._servers._max_concurrency / 2

    run(folder, scenario)


def test_a_push_under_way_is_no_restart(folder, caplog):
    async def scenario(controller, servers, listed):
        await controller.next_batch(1, 1)
        for server in servers:
            server.is_paused = True
        await asyncio.sleep(0.15)
        for server in servers:
            server.version = 2
        await asyncio.sleep(0.15)
        for server in servers:
            server.is_paused = False
        assert (await controller.next_batch(2, 2)).groups

    run(folder, scenario)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_pause_under_requests_costs_none_of_them(folder):
    async def scenario(controller, servers, listed):
        servers[0].hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: servers[0].num_open == 4)
        servers[0].is_paused = True
        servers[0].hold.set()
        await asyncio.sleep(0.2)  # it is looked at
        assert servers[0].num_open == 4
        servers[0].is_paused = False
        assert (await pending).metrics["rollout/num_retries"] == 0

    run(folder, scenario)


def test_a_server_that_was_left_paused_with_the_right_weights_is_told_to_continue_when_the_step_begins(folder):
    """The last call of a push did not reach it, or somebody else paused it:
    no other push is needed."""

    async def scenario(controller, servers, listed):
        servers[0].is_paused = True
        batch = await controller.next_batch(1, 1)
        assert num_servers(batch) == (2, 2) and servers[0].requests

    run(folder, scenario)


def test_a_server_that_comes_back_paused_gets_no_request_until_the_next_step(folder):
    """It may be in a push under way."""

    async def scenario(controller, servers, listed):
        paused, other = servers
        await controller.next_batch(1, 1)
        await paused.stop()
        await until(lambda: controller._servers.urls(ServerState.DOWN) == [paused.url])
        paused.is_paused = True
        await paused.start()
        await until(lambda: controller._servers.urls(ServerState.BEHIND) == [paused.url])
        await asyncio.sleep(0.15)
        assert controller._servers.urls(ServerState.CURRENT) == [other.url] and paused.is_paused
        paused.is_paused = False
        await until(lambda: len(controller._servers.urls(ServerState.CURRENT)) == 2)

    run(folder, scenario)


def test_a_server_that_others_pause_in_a_step_is_told_to_continue(folder, monkeypatch, caplog):
    monkeypatch.setattr("megatron_dapo.servers.server_pool.PAUSE_S", 0.1)

    async def scenario(controller, servers, listed):
        paused = servers[0]
        paused.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: paused.num_open == 4)
        paused.is_paused = True
        paused.hold.set()
        batch = await asyncio.wait_for(pending, 20)  # request_timeout_s is 50
        assert batch.metrics["rollout/num_retries"] == 0 and not paused.is_paused
        assert num_servers(batch) == (2, 2)

    run(folder, scenario, overrides=["actor_rollout_ref.rollout.request_timeout_s=50.0"])
    assert "is paused, or ill: it is told to continue" in caplog.text


@pytest.mark.parametrize("when", ["in a step", "between two steps"])
def test_a_server_that_is_ill_counts_as_lost_until_it_is_well(folder, monkeypatch, when):
    """Told to continue it takes no requests still."""
    monkeypatch.setattr("megatron_dapo.servers.server_pool.PAUSE_S", 0.1)

    async def scenario(controller, servers, listed):
        ill, other = servers
        await controller.next_batch(1, 1)
        if when == "in a step":
            ill.hold.clear()
            pending = asyncio.create_task(controller.next_batch(2, 1))
            await until(lambda: ill.num_open == 4)
            ill.is_ill = True
        else:
            ill.is_ill = True
            pending = asyncio.create_task(controller.next_batch(2, 1))
        batch = await asyncio.wait_for(pending, 20)
        assert numbers(batch) == [4, 5, 6, 7]
        assert batch.metrics["rollout/num_retries"] == (4 if when == "in a step" else 0)
        assert controller._servers.urls(ServerState.ILL) == [ill.url]
        num_requests = len(ill.requests)
        assert (await controller.next_batch(3, 1)).groups and len(ill.requests) == num_requests
        ill.hold.set()
        ill.is_ill = False
        await until(lambda: len(controller._servers.urls(ServerState.CURRENT)) == 2)

    run(folder, scenario, overrides=["actor_rollout_ref.rollout.request_timeout_s=50.0"])


def test_a_server_that_comes_back_with_newer_weights_is_up(folder):
    """They are none of ours, or the next ones: either way it takes part in the next push."""

    async def scenario(controller, servers, listed):
        (server,) = servers
        await controller.next_batch(1, 1)
        await server.stop()
        await until(lambda: controller._servers.urls(ServerState.DOWN))
        server.version = 2
        await server.start()
        assert await needs_sync(asyncio.wait_for(controller.next_batch(2, 1), 5))

        server.version = 1
        server.hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        await until(lambda: server.num_open == 8)
        await server.stop()
        await until(lambda: controller._servers.urls(ServerState.DOWN))
        server.version = 2
        server.hold.set()
        await server.start()
        assert await needs_sync(asyncio.wait_for(pending, 5))

    run(folder, scenario, num_servers=1)


def test_a_server_that_hangs_after_it_was_removed_costs_no_request(folder, monkeypatch):
    monkeypatch.setattr("megatron_dapo.servers.server_pool._PROBE_TIMEOUT_S", 0.1)

    async def scenario(controller, servers, listed):
        removed, other = servers
        removed.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: removed.num_open == 4)
        listed([other])
        await until(lambda: len(controller._servers.servers) == 1)
        removed.is_frozen = True
        batch = await asyncio.wait_for(pending, 5)
        assert numbers(batch) == [0, 1, 2, 3] and batch.metrics["rollout/num_retries"] == 4
        # it has none left, and is let go
        await until(lambda: list(controller._servers._watches) == [other.url])

    run(folder, scenario, overrides=["actor_rollout_ref.rollout.request_timeout_s=50.0"])


def test_a_watch_that_ends_by_an_error_ends_the_step_with_it(folder, caplog):
    async def scenario(controller, servers, listed):
        for server in servers:
            server.hold.clear()
        controller._servers._listed.read_or_keep = None
        await until(lambda: controller._servers._watch.done())
        with pytest.raises(RolloutError, match="watch over the servers ended with TypeError: 'NoneType'"):
            controller._servers._listed.read_or_keep = controller._servers._listed.read
            await asyncio.wait_for(controller.next_batch(1, 1), 5)

    run(folder, scenario)
    assert "the servers are watched no more" in caplog.text


def test_the_mean_of_current_servers_is_over_the_step_alone(folder):
    async def scenario(controller, servers, listed):
        await controller.next_batch(1, 1)
        servers[0].version = 2
        await controller._servers.expect(2)  # as a validation does
        await asyncio.sleep(0.1)
        servers[1].version = 2
        await until(lambda: len(controller._servers.urls(ServerState.CURRENT)) == 2)
        assert num_servers(await controller.next_batch(2, 2)) == (2, 2)

    run(folder, scenario)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, RolloutError, r"after 0.2 s .*startup_timeout_s.* no SGLang server: none \(from .*servers.txt\)"),
        ("# soon\n", RolloutError, "no SGLang server"),
        ("http://127.0.0.1:9\nnode5:30000\n", UserError, "line 2: 'node5:30000'"),
    ],
)
def test_a_start_without_servers_or_with_a_malformed_line_ends_in_time_and_names_the_file(
    tmp_path, text, error, message
):
    file = tmp_path / "servers.txt"
    if text is not None:
        file.write_text(text)
    pool = ServerPool(ServerList(file=file), max_concurrency=1, down_timeout_s=1.0, probe_interval_s=0.05)
    with pytest.raises(error, match=message):
        asyncio.run(pool.start(0.2))


def test_all_servers_lost_for_too_long_ends_the_step_naming_them_and_its_groups_stay(folder):
    async def scenario(controller, servers, listed):
        await controller.next_batch(1, 1)
        for server in servers:
            server.hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        await until(lambda: sum(server.num_open for server in servers) == 8)
        for server in servers:
            await server.stop()
        with pytest.raises(RolloutError, match="all SGLang servers have been down for 0.5 s") as error:
            await pending
        assert all(server.url in str(error.value) for server in servers)
        assert len(controller.state_dict()["queue"]["open"]) == 4, "the step can be saved as it is"

    run(folder, scenario, overrides=[f"{STARTUP}=0.5"])


def test_all_servers_count_as_down_from_the_next_failed_look_on_after_a_step_that_was_given_up(tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text("http://127.0.0.1:1\n")

    async def scenario():
        pool = ServerPool(ServerList(file=file), max_concurrency=1, down_timeout_s=1.0, probe_interval_s=0.05)
        expecting = asyncio.create_task(pool.expect(1))
        await asyncio.sleep(0)
        expecting.cancel()
        await asyncio.wait([expecting])
        pool._all_down_since = None
        pool.mark_down(pool.servers[0], "refused")
        assert pool._all_down_since is not None
        await pool.close()

    asyncio.run(scenario())

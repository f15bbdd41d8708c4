"""The controller with failing, hanging or outdated servers: errors name them, nothing is lost."""

import asyncio

import pytest

from megatron_dapo.common.rollout_errors import NeedsSync, RolloutError
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import (
    FakeServer,
    Script,
    make_config,
    needs_sync,
    prompt_numbers,
    run_in_folder,
)

pytestmark = pytest.mark.unit


def test_failed_and_aborted_requests_are_sent_again_and_counted(folder):
    async def scenario(controller, servers):
        servers[0].failures = [500, "abort", 500]
        batch = await controller.next_batch(1, 1)
        assert prompt_numbers(batch) == [0, 1, 2, 3]
        assert batch.metrics["rollout/num_retries"] == 3
        assert (await controller.next_batch(2, 1)).metrics["rollout/num_retries"] == 0

    run_in_folder(folder, scenario)


def test_a_request_that_keeps_failing_ends_with_the_servers_and_the_reason(folder):
    async def scenario(controller, servers):
        for server in servers:
            server.failures = [500] * 100
        with pytest.raises(RolloutError) as error:
            await controller.next_batch(1, 1)
        assert "failed 4 times" in str(error.value) and "HTTP 500" in str(error.value)
        # the other server was tried
        assert all(server.url in str(error.value) for server in servers)

    run_in_folder(folder, scenario, num_servers=2)


def test_a_dead_server_costs_no_sample(folder):
    script = Script()

    async def scenario(controller, servers):
        for server in servers:
            server.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        while sum(server.num_open for server in servers) < 8:
            await asyncio.sleep(0.01)
        servers[1].hold.set()
        await servers[0].stop()
        batch = await pending
        assert prompt_numbers(batch) == [0, 1, 2, 3]
        assert batch.metrics["rollout/num_retries"] == 4
        assert set(script.num_answers.values()) == {2}

    run_in_folder(folder, scenario, script, num_servers=2)


def test_a_server_that_comes_back_with_other_weights_asks_for_a_sync_and_nothing_is_lost(folder):
    script = Script()

    async def scenario(controller, servers):
        (server,) = servers
        server.hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 1))
        while server.num_open < 8:
            await asyncio.sleep(0.01)
        await server.stop()
        server.version = "default"
        server.hold.set()
        await server.start()
        assert await needs_sync(pending)
        assert not script.num_answers

        server.version = 1
        batch = await controller.next_batch(1, 1)
        assert prompt_numbers(batch) == [0, 1, 2, 3]
        assert prompt_numbers(await controller.next_batch(2, 1)) == [4, 5, 6, 7]

    run_in_folder(folder, scenario, script)


def test_samples_by_other_weights_are_not_used_and_finished_groups_stay(folder):
    """The server changes its weights after p0 and p1 are answered,
    unseen by the check before the step."""
    script = Script()

    async def scenario(controller, servers):
        (server,) = servers
        answer = script.answer

        def answer_and_restart(prompt):
            if sum(script.num_answers.values()) == 4:
                server.version = 0
            return answer(prompt)

        script.answer = answer_and_restart
        assert await needs_sync(controller.next_batch(1, 1))
        server.version = 1
        batch = await controller.next_batch(1, 1)
        assert prompt_numbers(batch) == [0, 1, 2, 3]
        assert {
            version for group in batch.groups for sample in group.samples for version in sample.weight_versions
        } == {1}
        assert script.num_answers[0] == script.num_answers[1] == 2  # not asked again
        assert batch.metrics["dapo/num_gen_batches"] == 1

    run_in_folder(folder, scenario, script, overrides=["actor_rollout_ref.rollout.max_concurrency=1"])


def test_with_one_stale_server_of_two_the_gen_batch_is_finished_by_the_other(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        servers[0].version = 0
        # before work is spent on half of the servers
        assert await needs_sync(controller.next_batch(2, 1))
        servers[0].version = 1
        servers[0].hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        while servers[0].num_open < 4:
            await asyncio.sleep(0.01)
        servers[0].version = 0
        servers[0].hold.set()
        batch = await pending
        assert prompt_numbers(batch) == [4, 5, 6, 7]
        assert all(sample.weight_versions.tolist() == [1, 1] for group in batch.groups for sample in group.samples)

    run_in_folder(folder, scenario, num_servers=2, overrides=["algorithm.dynamic_sampling.enable=false"])


def test_pushes_that_do_not_help_end_with_the_server(folder):
    async def scenario(controller, servers):
        for _ in range(3):
            assert await needs_sync(controller.next_batch(1, 5))
        with pytest.raises(RolloutError, match=servers[0].url):
            await controller.next_batch(1, 5)
        with pytest.raises(NeedsSync, match=servers[0].url):
            await controller.evaluate(1, 5)

    run_in_folder(folder, scenario, overrides=[f"data.val_files=[{folder}/val.jsonl]"])


def test_the_step_deadline_names_missing_groups_and_busy_servers(folder):
    async def scenario(controller, servers):
        servers[1].hold.clear()
        with pytest.raises(RolloutError) as error:
            await controller.next_batch(1, 1)
        assert "4 of 4 groups are missing, 4 unfinished" in str(error.value)
        assert f"{servers[1].url} (4 requests)" in str(error.value)
        assert f"{servers[0].url} (" not in str(error.value)

    run_in_folder(folder, scenario, num_servers=2, overrides=["actor_rollout_ref.rollout.step_timeout_s=1.0"])


def test_a_server_that_never_comes_up_is_named(folder):
    async def main():
        server = await FakeServer(Script()).start()
        missing = "http://127.0.0.1:9"
        overrides = ["actor_rollout_ref.rollout.server.startup_timeout_s=0.3"]
        controller = Controller(make_config(folder, [server, missing], *overrides))
        try:
            with pytest.raises(RolloutError, match="1 of 2 .*startup_timeout_s.*: http://127.0.0.1:9;"):
                await controller.start()
        finally:
            await controller.close()
            await server.stop()

    asyncio.run(main())

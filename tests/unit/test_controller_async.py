"""The controller with max_staleness above 0: sampling beside training, and no token too old."""

import asyncio
import json
import sys

import psutil
import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Interrupted, RolloutError
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import (
    RIGHT,
    WRONG,
    FakeServer,
    Script,
    make_config,
    needs_sync,
    prompt_numbers,
    run_with_controller,
    until,
)

pytestmark = pytest.mark.unit

CORRECTED = "algorithm.rollout_correction.rollout_is=token"


def run_in_folder(folder, scenario, script=None, num_servers=1, overrides=()):
    """As a trainer does: the servers get version 0 first."""

    async def pushed_first(controller, servers):
        push(servers, 0)
        return await scenario(controller, servers)

    return run_with_controller(
        pushed_first, lambda servers: make_config(folder, servers, *overrides), num_servers, script
    )


def with_age(max_staleness, *overrides):
    return [f"actor_rollout_ref.rollout.max_staleness={max_staleness}", CORRECTED, *overrides]


def account(controller):
    """Numbers of groups, after a check that every draw is in one place."""
    account = controller._drawing.queue.account
    assert account.is_closed, account
    return account


def push(servers, version):
    for server in servers:
        server.version = version


def versions(batch):
    return {version for group in batch.groups for each in group.samples for version in each.weight_versions}


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_servers_sample_ahead_as_far_as_the_bound_allows_and_no_further(folder, max_staleness):
    async def scenario(controller, servers):
        first = await controller.next_batch(1, 0)
        assert prompt_numbers(first) == [0, 1, 2, 3] and first.metrics["rollout/staleness_max"] == 0
        ahead = 4 * max_staleness
        await until(lambda: account(controller).num_ready == ahead)
        await asyncio.sleep(0.2)
        assert account(controller).num_drawn == 4 + ahead == len(servers[0].requests) / 2
        for step in range(2, 8):
            push(servers, step - 1)
            batch = await controller.next_batch(step, step - 1)
            assert prompt_numbers(batch) == list(range(4 * step - 4, 4 * step))
            assert batch.metrics["rollout/num_groups_ready"] == ahead
            assert batch.metrics["rollout/staleness_max"] == min(max_staleness, step - 1)
            assert batch.metrics["rollout/num_groups_discarded"] == 0
            await until(lambda: account(controller).num_ready == ahead)
        assert batch.metrics["rollout/held_s"] > 0 and 0 < batch.metrics["rollout/slots_used"] < 1

    run_in_folder(folder, scenario, overrides=with_age(max_staleness))


def test_nothing_is_drawn_that_no_step_would_train_on(folder):
    async def scenario(controller, servers):
        for step in (1, 2, 3):
            push(servers, step - 1)
            assert len((await controller.next_batch(step, step - 1)).groups) == 4
        await asyncio.sleep(0.2)
        assert account(controller).num_drawn == 12 and account(controller).num_open == 0

    run_in_folder(folder, scenario, overrides=with_age(4, "trainer.total_training_steps=3"))


def test_a_prompt_is_drawn_when_a_slot_is_free_for_it(folder):
    """Two groups of two for four slots: waiting draws are in the data set, not in the queue."""

    async def scenario(controller, servers):
        servers[0].hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 0))
        await until(lambda: servers[0].num_open == 4)
        await asyncio.sleep(0.2)
        assert account(controller).num_open == 2
        servers[0].hold.set()
        batch = await pending
        assert prompt_numbers(batch) == [0, 1, 2, 3]
        assert servers[0].max_open == 4

    run_in_folder(folder, scenario, overrides=with_age(2, "actor_rollout_ref.rollout.max_concurrency=4"))


def test_batches_are_in_the_order_of_draws_whoever_answers_first(folder):
    """And of groups without signal the same are dropped."""
    script = Script({2: RIGHT, 3: WRONG, 9: RIGHT})

    async def scenario(controller, servers):
        batches = []
        for step in range(1, 5):
            push(servers, step - 1)
            script.delays = [0.1 * (number % 4) for number in range(12)]
            batches += prompt_numbers(await controller.next_batch(step, step - 1))
        assert batches == [number for number in range(19) if number not in (2, 3, 9)]

    run_in_folder(folder, scenario, script, num_servers=2, overrides=with_age(2))


def test_close_ends_what_is_under_way_between_two_steps_the_workers_and_the_connections(folder):
    async def scenario(controller, servers):
        tasks_before, children_before = asyncio.all_tasks(), psutil.Process().children()
        await controller.start()
        started = set(psutil.Process().children()) - set(children_before)
        await controller.next_batch(1, 0)
        servers[0].hold.clear()
        push(servers, 1)
        await controller.next_batch(2, 1)
        await until(lambda: servers[0].num_open == 8)
        sessions = [server.client._session for server in controller._servers.servers]
        assert len(started) == 1 and controller._servers.in_flight() == {servers[0].url: 8}
        await controller.close()
        assert not any(worker.is_running() for worker in started) and all(session.closed for session in sessions)
        assert controller._servers.in_flight() == {} and account(controller).num_open == 4
        servers[0].hold.set()
        await until(lambda: servers[0].num_open == 0)
        await until(lambda: asyncio.all_tasks() <= tasks_before)
        await controller.close()  # the cleanup of a failed start closes again

    async def main():
        server = await FakeServer(Script(), version=0).start()
        try:
            await scenario(Controller(make_config(folder, [server], *with_age(1))), [server])
        finally:
            await server.stop()

    asyncio.run(main())


def test_a_failure_while_nobody_waits_is_raised_by_the_next_call(folder):
    async def scenario(controller, servers):
        await controller.next_batch(1, 0)
        await until(lambda: account(controller).num_ready == 4)
        servers[0].failures = [500] * 1000
        push(servers, 1)
        assert (await controller.next_batch(2, 1)).groups
        await until(lambda: controller._filling._failure is not None)
        push(servers, 2)
        with pytest.raises(RolloutError, match="failed 4 times"):
            await controller.next_batch(3, 2)
        assert account(controller).num_drawn == 12
        servers[0].failures = []
        batch = await controller.next_batch(3, 2)
        assert prompt_numbers(batch) == [8, 9, 10, 11], "the groups that were open are sampled, and in their places"

    run_in_folder(folder, scenario, overrides=with_age(1, "actor_rollout_ref.rollout.max_retries=3"))


def test_a_failure_while_nobody_waits_is_raised_by_an_evaluation_too(folder):
    async def scenario(controller, servers):
        servers[0].hold.clear()
        pending = asyncio.create_task(controller.next_batch(1, 0))
        await until(lambda: servers[0].num_open >= 8)
        servers[0].hold.set()
        await pending
        controller._filling._fail(RolloutError("as the test has it"))
        with pytest.raises(RolloutError, match="as the test has it"):
            await controller.evaluate(1, 0)
        await controller.evaluate(1, 0)

    run_in_folder(folder, scenario, overrides=with_age(1, f"data.val_files=[{folder}/val.jsonl]"))


def test_an_evaluation_is_exact_while_requests_of_training_go_on(folder):
    async def scenario(controller, servers):
        await controller.next_batch(1, 0)
        await until(lambda: account(controller).num_ready == 4)
        servers[0].script.delays = [0.4] * 4
        push(servers, 1)
        drawn = account(controller).num_drawn
        metrics = await controller.evaluate(1, 1)
        assert metrics["val/num_prompts"] == 3
        await until(lambda: account(controller).num_ready == 8)
        assert account(controller).num_drawn == drawn + 4, "the evaluation's weights let training go on"
        assert versions(await controller.next_batch(2, 1)) == {0}

    run_in_folder(folder, scenario, overrides=with_age(1, f"data.val_files=[{folder}/val.jsonl]"))


def test_replayed_responses_and_greedy_baselines_go_on_ahead_of_the_trainer(folder):
    """Blocks of prompts are made in the background too;
    a group needs its baseline beside its responses."""
    replay = "exp_manager.experience_replay"
    overrides = with_age(
        1,
        "algorithm.dynamic_sampling.enable=false",
        "algorithm.adv_estimator=remax",
        f"{replay}.enable=true",
        f"{replay}.replay_start_ratio=0.0",
        f"{replay}.exp_ratio=0.5",
    )

    async def scenario(controller, servers):
        uids = []
        num_replayed = 0
        for step in range(1, 7):
            push(servers, step - 1)
            batch = await controller.next_batch(step, step - 1)
            uids += [group.uid for group in batch.groups]
            assert all(len(group.samples) == 2 and group.baseline_reward is not None for group in batch.groups)
            assert batch.metrics["rollout/staleness_max"] <= 1, "a replayed response has no age"
            num_replayed += batch.metrics["replay/num_replayed_groups"]
            await until(lambda: account(controller).num_ready == 4)
        assert [uid.partition("-")[0] for uid in uids] == [f"{number:08d}" for number in range(24)]
        assert num_replayed == 8, "half of each block from the third on: before there is nothing to replay"

    run_in_folder(folder, scenario, overrides=overrides)


def test_a_server_that_comes_back_with_other_weights_asks_for_a_push_and_nothing_is_lost(folder):
    script = Script()

    async def scenario(controller, servers):
        await controller.next_batch(1, 0)
        await until(lambda: account(controller).num_ready == 4)
        push(servers, 1)
        for server in servers:
            server.hold.clear()
        servers[1].version = 0
        assert (await controller.next_batch(2, 1)).groups, "a step that is ready waits for nobody"
        push(servers, 2)
        servers[1].version = 0
        pending = asyncio.create_task(controller.next_batch(3, 2))
        await asyncio.sleep(0.1)
        servers[0].hold.set()
        assert await needs_sync(pending)
        servers[1].version = 2
        servers[1].hold.set()
        batch = await controller.next_batch(3, 2)
        assert prompt_numbers(batch) == [8, 9, 10, 11]
        assert set(script.num_answers[number] for number in range(12)) == {2}

    run_in_folder(folder, scenario, script, num_servers=2, overrides=with_age(1))


def test_a_restored_controller_loses_and_doubles_nothing_and_makes_no_burst(folder):
    """Stopped with finished samples of open groups; the uids go on,
    and the samples are not asked for again."""
    overrides = with_age(1, "algorithm.dynamic_sampling.enable=false")

    async def first(controller, servers):
        servers[0].script.delays = [600.0] * 3 + [0.0] * 13  # taken from the end
        batch = await controller.next_batch(1, 0)
        await until(lambda: sum(servers[0].script.num_answers.values()) == 13)
        await asyncio.sleep(0.2)
        push(servers, 1)
        waiting = asyncio.create_task(controller.next_batch(2, 1))
        await asyncio.sleep(0.2)
        controller.stop_asked.set()
        with pytest.raises(Interrupted):
            await waiting
        assert account(controller).num_open > 0
        return from_bytes(to_bytes(controller.state_dict())), [group.uid for group in batch.groups]

    state, uids = run_in_folder(folder, first, overrides=overrides)
    queue = state["queue"]
    num_kept = sum(len(each["samples"]) for part in ("kept", "finished") for each in queue[part])
    num_open = sum(len(each["samples"]) for each in queue["open"] if "samples" in each)
    assert queue["num_drawn"] == 12 and num_kept + num_open == 24 - 8 - 3, "8 samples were handed out, 3 lack"

    async def second(controller, servers):
        controller.load_state_dict(state)
        push(servers, 1)
        batch = await controller.next_batch(2, 1)
        await until(lambda: account(controller).num_ready == 4)
        assert account(controller).num_drawn == 12 and len(servers[0].requests) == 3
        push(servers, 2)
        third = await controller.next_batch(3, 2)
        return [group.uid for group in (*batch.groups, *third.groups)]

    uids += run_in_folder(folder, second, overrides=overrides)
    assert [uid.partition("-")[0] for uid in uids] == [f"{number:08d}" for number in range(12)]


def test_a_reward_that_breaks_while_the_trainer_trains_stops_the_run_and_its_prompts_are_drawn_again(folder):
    """It fails on the prompts from p8 on: those of the third step."""
    rows = [json.loads(line) | {"extra_info": {}} for line in (folder / "train.jsonl").read_text().splitlines()]
    broken = [row | {"extra_info": {"crash": number >= 8}} for number, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in broken))
    overrides = with_age(1, "algorithm.dynamic_sampling.enable=false")

    async def breaks(controller, servers):
        await controller.next_batch(1, 0)
        await until(lambda: account(controller).num_ready == 4)
        push(servers, 1)
        await controller.next_batch(2, 1)
        await until(lambda: controller._filling._failure is not None)
        state = from_bytes(to_bytes(controller.state_dict()))
        assert account(controller).num_handed == 8
        push(servers, 2)
        with pytest.raises(UserError, match=r"rollout step 3: 8 of \d+ responses got no verdict"):
            await controller.next_batch(3, 2)
        return state

    state = run_in_folder(folder, breaks, Script(default=WRONG), overrides=overrides)
    (folder / "fake_rewards.py").write_text((folder / "fake_rewards.py").read_text().replace("raise", "pass #"))
    sys.modules.pop("fake_rewards", None)

    async def goes_on(controller, servers):
        controller.load_state_dict(state)
        push(servers, 2)
        batch = await controller.next_batch(3, 2)
        assert prompt_numbers(batch) == [8, 9, 10, 11]
        assert batch.metrics["reward/num_exceptions"] == 0

    run_in_folder(folder, goes_on, Script(default=WRONG), overrides=overrides)


def test_the_step_deadline_says_who_holds_up_the_step(folder):
    async def scenario(controller, servers):
        assert prompt_numbers(await controller.next_batch(1, 0)) == [0, 1, 2, 3]
        await until(lambda: account(controller).num_ready == 4)
        push(servers, 1)
        servers[0].hold.clear()
        assert prompt_numbers(await controller.next_batch(2, 1)) == [4, 5, 6, 7]
        push(servers, 2)
        with pytest.raises(RolloutError) as error:
            await controller.next_batch(3, 2)
        words = str(error.value)
        assert "4 of 4 groups are missing, 8 unfinished; last step handed over 2, weight version 2" in words
        assert "0 groups ready, 8 open, the first of them 00000008-8 with 0 of 2 responses" in words

    overrides = with_age(1, "actor_rollout_ref.rollout.step_timeout_s=1.5")
    run_in_folder(folder, scenario, overrides=overrides)

"""The controller against scripted servers: exact batches, failures survived, stale weights refused, nothing lost."""

import asyncio
import json
import pickle
import sys
from dataclasses import replace

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.rollout import client
from megatron_dapo.rollout.client import Generation
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.errors import Interrupted, NeedsSync, RolloutError
from tests.fake_rollout import MIXED, RIGHT, WRONG, FakeServer, Script, make_config, run_with_controller, write_files

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path, num_val=3)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("megatron_dapo.rollout.sampling._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("megatron_dapo.rollout.controller.PROBE_INTERVAL_S", 0.05)
    yield tmp_path
    sys.modules.pop("fake_rewards", None)


def run(folder, scenario, script=None, num_servers=1, overrides=()):
    """Runs `await scenario(controller, servers)` with started servers and controller; closes all."""
    return run_with_controller(scenario, lambda servers: make_config(folder, servers, *overrides), num_servers, script)


A_VERSION_OLD = ("actor_rollout_ref.rollout.max_staleness=1", "algorithm.rollout_correction.rollout_is=token")


def numbers(batch):
    return [int(group.prompt.text[1:]) for group in batch.groups]


def test_gen_batches_kept_filtered_and_surplus_are_exact_over_two_steps(folder):
    """Gen batches of 6: p0..p5 keep 3, p6..p11 keep 2 (one too many, with which the next step begins)."""
    script = Script({0: RIGHT, 1: WRONG, 2: WRONG, 6: RIGHT, 7: RIGHT, 8: RIGHT, 9: WRONG})

    async def scenario(controller, servers):
        first = await controller.next_batch(1, 1)
        assert numbers(first) == [3, 4, 5, 10]
        expected = {
            "dapo/num_gen_batches": 2, "dapo/num_kept_groups": 5, "dapo/num_filtered_groups": 7,
            "dapo/num_filtered_samples": 14, "dapo/filtered_all_correct": 4, "dapo/filtered_all_incorrect": 3,
            "rollout/num_surplus_groups_used": 0, "rollout/staleness_max": 0, "rollout/num_tokens": 48,
            "reward/accuracy": 13 / 24, "train/accuracy": 0.5, "response_length/mean": 2, "prompt_length/mean": 1,
        }  # fmt: skip
        assert {name: first.metrics[name] for name in expected} == pytest.approx(expected)
        assert sum(script.num_answers.values()) == len(servers[0].requests) == 24

        servers[0].version = 2
        second = await controller.next_batch(2, 2)
        assert numbers(second) == [11, 12, 13, 14]
        assert second.metrics["rollout/num_surplus_groups_used"] == 1
        assert second.metrics["rollout/staleness_max"] == 1
        assert second.metrics["rollout/num_groups_discarded"] == 0
        assert second.groups[0].samples[0].weight_versions == (1, 1)
        assert max(script.num_answers) == 17 and set(script.num_answers.values()) == {2}

    run(folder, scenario, script, overrides=["data.gen_batch_size=6", *A_VERSION_OLD])


def test_a_step_is_trained_on_what_its_own_weights_wrote(folder):
    """What a gen batch had too much of is discarded, and counted."""
    script = Script({0: RIGHT, 1: WRONG, 2: WRONG, 6: RIGHT, 7: RIGHT, 8: RIGHT, 9: WRONG})

    async def scenario(controller, servers):
        first = await controller.next_batch(1, 1)
        assert numbers(first) == [3, 4, 5, 10] and first.metrics["rollout/num_groups_discarded"] == 1
        servers[0].version = 2
        second = await controller.next_batch(2, 2)
        assert numbers(second) == [12, 13, 14, 15] and second.metrics["rollout/num_groups_discarded"] == 2
        assert second.metrics["rollout/num_surplus_groups_used"] == second.metrics["rollout/staleness_max"] == 0
        versions = {version for group in second.groups for each in group.samples for version in each.weight_versions}
        assert versions == {2}

    run(folder, scenario, script, overrides=["data.gen_batch_size=6"])


def test_without_dynamic_sampling_one_gen_batch_is_handed_over_whole(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert numbers(batch) == [0, 1, 2, 3]
        assert batch.metrics["dapo/num_gen_batches"] == 1
        assert batch.metrics["dapo/num_filtered_groups"] == 0

    run(folder, scenario, Script(default=WRONG), overrides=["algorithm.dapo.enable=false", "data.gen_batch_size=6"])


def test_uniform_data_ends_by_policy_not_by_a_hang(folder):
    async def scenario(controller, servers):
        with pytest.raises(UserError, match="max_num_gen_batches = 3 .* all_incorrect 12"):
            await controller.next_batch(1, 1)
        assert len(servers[0].requests) == 3 * 4 * 2

    limit = "algorithm.dapo.dynamic_sampling.max_num_gen_batches=3"
    run(folder, scenario, Script(default=WRONG), overrides=[limit])
    partial = "algorithm.dapo.dynamic_sampling.on_exhausted=train_partial"
    run(folder, scenario, Script(default=WRONG), overrides=[limit, partial])


def test_train_partial_hands_over_the_groups_there_are(folder):
    async def scenario(controller, servers):
        assert numbers(await controller.next_batch(1, 1)) == [5]

    overrides = [
        "algorithm.dapo.dynamic_sampling.max_num_gen_batches=2",
        "algorithm.dapo.dynamic_sampling.on_exhausted=train_partial",
    ]
    run(folder, scenario, Script({5: MIXED}, default=RIGHT), overrides=overrides)


def test_groups_come_in_the_order_of_prompts_whatever_the_order_of_answers(folder):
    script = Script()
    script.delays = [0.15, 0.0, 0.1, 0.02, 0.0, 0.12, 0.05, 0.01]

    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert numbers(batch) == [0, 1, 2, 3]
        assert all(sample.uid == group.uid for group in batch.groups for sample in group.samples)

    run(folder, scenario, script, num_servers=2)


def test_all_groups_are_in_flight_at_once_within_the_limit_per_server(folder):
    script = Script()
    script.delays = [0.1] * 16

    async def scenario(controller, servers):
        await controller.next_batch(1, 1)
        assert [server.max_open for server in servers] == [3, 3]
        assert abs(len(servers[0].requests) - len(servers[1].requests)) <= 2

    overrides = ["data.train_batch_size=8", "actor_rollout_ref.rollout.max_concurrency=3"]
    run(folder, scenario, script, num_servers=2, overrides=overrides)


def test_what_servers_tell_of_their_caches_is_counted_per_step(folder, monkeypatch):
    def with_counts(answer: dict) -> Generation:
        return replace(generation_of(answer), num_retractions=1, num_cached_tokens=5)

    async def scenario(controller, servers):
        for step in (1, 2):
            metrics = (await controller.next_batch(step, 1)).metrics
            num_answers = len(servers[0].requests)
            servers[0].requests.clear()
            assert num_answers >= 8
            assert metrics["rollout/num_retractions"] == num_answers
            assert metrics["rollout/num_cached_tokens"] == 5 * num_answers

    generation_of = client.generation_of
    monkeypatch.setattr(client, "generation_of", with_counts)
    run(folder, scenario)


def test_failed_and_aborted_requests_are_sent_again_and_counted(folder):
    async def scenario(controller, servers):
        servers[0].failures = [500, "abort", 500]
        batch = await controller.next_batch(1, 1)
        assert numbers(batch) == [0, 1, 2, 3]
        assert batch.metrics["rollout/num_retries"] == 3
        assert (await controller.next_batch(2, 1)).metrics["rollout/num_retries"] == 0

    run(folder, scenario)


def test_a_request_that_keeps_failing_ends_with_the_servers_and_the_reason(folder):
    async def scenario(controller, servers):
        for server in servers:
            server.failures = [500] * 100
        with pytest.raises(RolloutError) as error:
            await controller.next_batch(1, 1)
        assert "failed 4 times" in str(error.value) and "HTTP 500" in str(error.value)
        assert all(server.url in str(error.value) for server in servers)  # the other server was tried

    run(folder, scenario, num_servers=2)


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
        assert numbers(batch) == [0, 1, 2, 3]
        assert batch.metrics["rollout/num_retries"] == 4
        assert set(script.num_answers.values()) == {2}

    run(folder, scenario, script, num_servers=2)


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
        batch = await pending
        assert batch.needs_sync and not batch.groups
        assert not script.num_answers

        server.version = 1
        batch = await controller.next_batch(1, 1)
        assert not batch.needs_sync
        assert numbers(batch) == [0, 1, 2, 3]
        assert numbers(await controller.next_batch(2, 1)) == [4, 5, 6, 7]

    run(folder, scenario, script)


def test_samples_by_other_weights_are_not_used_and_finished_groups_stay(folder):
    """The server changes its weights after p0 and p1 are answered, unseen by the check before the step."""
    script = Script()

    async def scenario(controller, servers):
        (server,) = servers
        answer = script.answer

        def answer_and_restart(prompt):
            if sum(script.num_answers.values()) == 4:
                server.version = 0
            return answer(prompt)

        script.answer = answer_and_restart
        assert (await controller.next_batch(1, 1)).needs_sync
        server.version = 1
        batch = await controller.next_batch(1, 1)
        assert numbers(batch) == [0, 1, 2, 3]
        assert {
            version for group in batch.groups for sample in group.samples for version in sample.weight_versions
        } == {1}
        assert script.num_answers[0] == script.num_answers[1] == 2  # not asked again
        assert batch.metrics["dapo/num_gen_batches"] == 1

    run(folder, scenario, script, overrides=["actor_rollout_ref.rollout.max_concurrency=1"])


def test_with_one_stale_server_of_two_the_gen_batch_is_finished_by_the_other(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        servers[0].version = 0
        assert (await controller.next_batch(2, 1)).needs_sync  # before work is spent on half of the servers
        servers[0].version = 1
        servers[0].hold.clear()
        pending = asyncio.create_task(controller.next_batch(2, 1))
        while servers[0].num_open < 4:
            await asyncio.sleep(0.01)
        servers[0].version = 0
        servers[0].hold.set()
        batch = await pending
        assert numbers(batch) == [4, 5, 6, 7]
        assert all(sample.weight_versions == (1, 1) for group in batch.groups for sample in group.samples)

    run(folder, scenario, num_servers=2, overrides=["algorithm.dapo.enable=false"])


def test_pushes_that_do_not_help_end_with_the_server(folder):
    async def scenario(controller, servers):
        for _ in range(3):
            assert (await controller.next_batch(1, 5)).needs_sync
        with pytest.raises(RolloutError, match=servers[0].url):
            await controller.next_batch(1, 5)
        with pytest.raises(NeedsSync, match=servers[0].url):
            await controller.evaluate(1, 5)

    run(folder, scenario, overrides=[f"data.val_files=[{folder}/val.jsonl]"])


def test_all_servers_down_is_an_error_that_names_them_within_the_deadline(folder):
    async def scenario(controller, servers):
        for server in servers:
            await server.stop()
        with pytest.raises(RolloutError, match="have been down for 0.3 s") as error:  # not: the step took too long
            await controller.next_batch(1, 1)
        assert all(server.url in str(error.value) for server in servers)

    overrides = ["actor_rollout_ref.rollout.server.startup_timeout_s=0.3"]
    run(folder, scenario, num_servers=2, overrides=overrides)


def test_the_step_deadline_names_missing_groups_and_busy_servers(folder):
    async def scenario(controller, servers):
        servers[1].hold.clear()
        with pytest.raises(RolloutError) as error:
            await controller.next_batch(1, 1)
        assert "4 of 4 groups are missing, 4 unfinished" in str(error.value)
        assert f"{servers[1].url} (4 requests)" in str(error.value)
        assert f"{servers[0].url} (" not in str(error.value)

    run(folder, scenario, num_servers=2, overrides=["actor_rollout_ref.rollout.step_timeout_s=1.0"])


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


def test_overlong_responses_are_punished_and_counted_by_finish_reason(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        long, short = batch.groups[0].samples
        assert (long.raw_reward, long.reward, long.is_truncated, long.finish_reason) == (1.0, 0.5, True, "length")
        assert (short.raw_reward, short.reward, short.is_truncated, short.finish_reason) == (0.0, 0.0, False, "stop")
        assert batch.metrics["dapo/num_truncated_samples"] == batch.metrics["dapo/num_truncated_by_length"] == 4
        assert batch.metrics["dapo/truncation_ratio"] == 0.5
        assert batch.metrics["reward/mean"] == 0.25 and batch.metrics["reward/raw_mean"] == 0.5
        assert batch.metrics["dapo/avg_truncation_penalty_applied"] == 0.5

    keys = "algorithm.dapo.overlong_reward_shaping."
    overrides = [f"{keys}enable=true", f"{keys}buffer_len=4", f"{keys}penalty_factor=0.5"]
    run(folder, scenario, Script(default=("right_long", "wrong")), overrides=overrides)


def test_a_reward_that_raises_costs_one_sample_and_is_counted(folder):
    write_files(folder, extra_info={"crash": True})

    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert batch.metrics["reward/num_exceptions"] == 4
        assert batch.groups[0].samples[1].reward_error.startswith("exception")

    run(folder, scenario)


def test_evaluation_is_greedy_and_counts_every_answer(folder):
    async def scenario(controller, servers):
        metrics = await controller.evaluate(0, 1)
        assert metrics["val/accuracy"] == pytest.approx(2 / 3)
        assert metrics["val/num_prompts"] == 3 and metrics["val/response_length_mean"] == 2
        assert {request["sampling_params"]["temperature"] for request in servers[0].requests} == {0.0}
        assert numbers(await controller.next_batch(1, 1)) == [0, 1, 2, 3]  # the training prompts are untouched

    script = Script({0: WRONG, 1: RIGHT, 2: RIGHT}, default=MIXED)
    overrides = [f"data.val_files=[{folder}/val.jsonl]", "algorithm.dapo.enable=false"]
    run(folder, scenario, script, overrides=overrides)


def test_a_restored_controller_goes_on_with_surplus_and_cursor(folder):
    overrides = ["data.gen_batch_size=6", *A_VERSION_OLD]

    async def first(controller, servers):
        await controller.next_batch(1, 1)
        return json.loads(json.dumps(controller.state_dict()))

    state = run(folder, first, overrides=overrides)

    async def second(controller, servers):
        controller.load_state_dict(state)
        batch = await controller.next_batch(2, 1)
        assert numbers(batch) == [4, 5, 6, 7]
        assert batch.metrics["rollout/num_surplus_groups_used"] == 2

    run(folder, second, overrides=overrides)


def test_a_step_that_is_asked_to_stop_keeps_its_finished_groups_and_goes_on_with_them(folder):
    script = Script()
    script.delays = [600.0] * 4 + [0.0] * 4  # taken from the end

    async def first(controller, servers):
        step = asyncio.create_task(controller.next_batch(1, 1))
        while not controller.state_dict()["queue"]["finished"]:
            await asyncio.sleep(0.01)
        controller.stop_asked.set()
        with pytest.raises(Interrupted):
            await step
        return json.loads(json.dumps(controller.state_dict()))

    state = run(folder, first, script, overrides=["actor_rollout_ref.rollout.max_concurrency=2"])

    async def second(controller, servers):
        controller.load_state_dict(state)
        batch = await controller.next_batch(1, 1)
        assert numbers(batch) == [0, 1, 2, 3] and batch.metrics["rollout/num_tokens"] == 16
        assert len(servers[0].requests) == 2 * (4 - len(state["queue"]["finished"]))

    run(folder, second)


def test_a_controller_refuses_the_state_of_other_prompts_and_stays_as_it_was(folder):
    async def first(controller, servers):
        await controller.next_batch(1, 1)
        return json.loads(json.dumps(controller.state_dict()))

    state = run(folder, first)
    file = folder / "train.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))

    async def second(controller, servers):
        before = controller.state_dict()
        with pytest.raises(UserError, match="content of the prompts"):
            controller.load_state_dict(state)
        assert controller.state_dict() == before

    run(folder, second)


def test_sample_responses_are_written_whole(folder):
    async def scenario(controller, servers):
        await controller.next_batch(3, 1)

    run(folder, scenario, overrides=["actor_rollout_ref.rollout.dump_samples=2"])
    (path,) = (folder / "run" / "rollouts").iterdir()
    assert path.name == "step_000003.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["prompt"] == "p0" and second["prompt"] == "p1"
    assert [answer["text"] for answer in first["responses"]] == ["right", "wrong"]
    assert [answer["correct"] for answer in first["responses"]] == [True, False]
    assert first["responses"][0]["weight_versions"] == [1]


def _broken_rewards(folder, body):
    (folder / "fake_rewards.py").write_text(f"def judge(data_source, response, ground_truth, extra_info):\n{body}\n")


SYNC_RAISES = "    return parse(response)\n\ndef parse(response):\n    raise LookupError('no such table')"
BROKEN_REWARDS = {
    "exception": SYNC_RAISES,
    "crash": "    import os; os._exit(3)",
    "timeout": "    raise TimeoutError",
}


@pytest.mark.parametrize("kind", BROKEN_REWARDS)
def test_a_reward_that_judges_no_response_ends_the_step_and_its_prompts_are_drawn_again(folder, kind):
    _broken_rewards(folder, BROKEN_REWARDS[kind])

    async def fails(controller, servers):
        before = controller.state_dict()
        with pytest.raises(UserError) as caught:
            await controller.next_batch(7, 1)
        assert controller.state_dict() == before
        with pytest.raises(UserError):
            await controller.evaluate(0, 1)
        return pickle.loads(pickle.dumps(caught.value)), before

    error, state = run(folder, fails, overrides=[f"data.val_files=[{folder}/val.jsonl]", "reward.max_error_share=1.0"])
    assert "rollout step 7: 8 of 8" in str(error) and f"({kind} 8)" in str(error) and "fake_rewards:judge" in str(error)
    assert "max_error_share" not in str(error)  # which allows them all
    if kind == "exception":
        shown = error.report()
        assert shown.count("Traceback") == 1
        assert (
            "fake_rewards.py" in shown and "return parse(response)" in shown and "LookupError: no such table" in shown
        )
        assert "worker_process" not in shown and "registry" not in shown

    write_files(folder, num_val=3)

    async def goes_on(controller, servers):
        controller.load_state_dict(state)
        assert numbers(await controller.next_batch(7, 1)) == [0, 1, 2, 3]

    run(folder, goes_on)


@pytest.mark.parametrize(("share", "stops"), [(0.5, False), (0.4, True), (1.0, False)])
def test_the_share_of_responses_without_a_verdict_that_ends_a_run_is_a_key(folder, share, stops):
    write_files(folder, extra_info={"crash": True})  # every second response

    async def scenario(controller, servers):
        if not stops:
            assert (await controller.next_batch(1, 1)).metrics["reward/num_exceptions"] == 4
            return
        with pytest.raises(UserError, match=r"reward.max_error_share = 0.4"):
            await controller.next_batch(1, 1)

    run(folder, scenario, overrides=[f"reward.max_error_share={share}"])

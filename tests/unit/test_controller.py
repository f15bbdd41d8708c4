"""The controller against scripted servers: exact batches in the order of prompts,
a resumable state."""

import asyncio
import json
from dataclasses import replace

import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Interrupted
from megatron_dapo.servers import client
from megatron_dapo.servers.client import Generation
from tests.fake_rollout import MIXED, RIGHT, WRONG, Script, prompt_numbers, run_in_folder

pytestmark = pytest.mark.unit


def test_waves_kept_filtered_and_discarded_are_exact_over_two_steps(folder):
    """Waves of 6 at most: p0..p5 keep 3, p6..p11 keep 2, of which the step needs one;
    p12..p17 keep 4."""
    script = Script({number: RIGHT for number in (0, 6, 7, 8)} | {number: WRONG for number in (1, 2, 9, 12, 17, 18)})

    async def scenario(controller, servers):
        first = await controller.next_batch(1, 1)
        assert prompt_numbers(first) == [3, 4, 5, 10]
        expected = {
            "dapo/num_gen_batches": 2, "dapo/num_kept_groups": 5, "dapo/num_filtered_groups": 7,
            "dapo/num_filtered_samples": 14, "dapo/filtered_all_correct": 4, "dapo/filtered_all_incorrect": 3,
            "rollout/num_groups_ready": 0, "rollout/num_groups_discarded": 1, "rollout/num_groups_open": 0,
            "rollout/staleness_max": 0, "rollout/staleness_mean": 0, "rollout/version_span_max": 0,
            "rollout/held_s": 0, "rollout/num_tokens": 48,
            "reward/accuracy": 13 / 24, "train/accuracy": 0.5, "response_length/mean": 2, "prompt_length/mean": 1,
        }  # fmt: skip
        assert {name: first.metrics[name] for name in expected} == pytest.approx(expected)
        assert sum(script.num_answers.values()) == len(servers[0].requests) == 24

        servers[0].version = 2
        second = await controller.next_batch(2, 2)
        assert prompt_numbers(second) == [13, 14, 15, 16]
        versions = {version for group in second.groups for each in group.samples for version in each.weight_versions}
        assert versions == {2}
        account = controller._drawing.queue.account
        assert account.is_closed and account.num_handed == 8 and account.num_open == account.num_ready == 0

    run_in_folder(folder, scenario, script, overrides=["data.gen_batch_size=6"])


def test_without_dynamic_sampling_one_gen_batch_is_handed_over_whole(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert prompt_numbers(batch) == [0, 1, 2, 3]
        assert batch.metrics["dapo/num_gen_batches"] == 1
        assert batch.metrics["dapo/num_filtered_groups"] == 0

    run_in_folder(
        folder,
        scenario,
        Script(default=WRONG),
        overrides=["algorithm.dynamic_sampling.enable=false", "data.gen_batch_size=6"],
    )


def test_uniform_data_ends_by_policy_not_by_a_hang(folder):
    async def scenario(controller, servers):
        with pytest.raises(UserError, match="max_num_gen_batches = 3 .* all_incorrect 12"):
            await controller.next_batch(1, 1)
        assert len(servers[0].requests) == 3 * 4 * 2

    limit = "algorithm.dynamic_sampling.max_num_gen_batches=3"
    run_in_folder(folder, scenario, Script(default=WRONG), overrides=[limit])
    partial = "algorithm.dynamic_sampling.on_exhausted=train_partial"
    run_in_folder(folder, scenario, Script(default=WRONG), overrides=[limit, partial])


def test_all_groups_are_in_flight_at_once_within_the_limit_per_server(folder):
    script = Script()
    script.delays = [0.1] * 16

    async def scenario(controller, servers):
        await controller.next_batch(1, 1)
        assert [server.max_open for server in servers] == [3, 3]
        assert abs(len(servers[0].requests) - len(servers[1].requests)) <= 2

    overrides = ["data.train_batch_size=8", "actor_rollout_ref.rollout.max_concurrency=3"]
    run_in_folder(folder, scenario, script, num_servers=2, overrides=overrides)


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
    run_in_folder(folder, scenario)


def test_evaluation_is_greedy_and_counts_every_answer(folder):
    async def scenario(controller, servers):
        metrics = await controller.evaluate(0, 1)
        assert metrics["val/accuracy"] == pytest.approx(2 / 3)
        assert metrics["val/num_prompts"] == 3 and metrics["val/response_length_mean"] == 2
        assert {request["sampling_params"]["temperature"] for request in servers[0].requests} == {0.0}
        # the training prompts are untouched
        assert prompt_numbers(await controller.next_batch(1, 1)) == [0, 1, 2, 3]

    script = Script({0: WRONG, 1: RIGHT, 2: RIGHT}, default=MIXED)
    overrides = [f"data.val_files=[{folder}/val.jsonl]", "algorithm.dynamic_sampling.enable=false"]
    run_in_folder(folder, scenario, script, overrides=overrides)


def test_a_restored_controller_goes_on_with_the_cursor_and_the_acceptance(folder):
    """Of the first gen batch of 6 all are kept: then 4 prompts are enough for 4 groups."""
    overrides = ["data.gen_batch_size=6"]

    async def first(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert batch.metrics["rollout/num_groups_discarded"] == 2
        return from_bytes(to_bytes(controller.state_dict()))

    state = run_in_folder(folder, first, overrides=overrides)

    async def second(controller, servers):
        controller.load_state_dict(state)
        assert prompt_numbers(await controller.next_batch(2, 1)) == [6, 7, 8, 9]
        assert len(servers[0].requests) == 8

    run_in_folder(folder, second, overrides=overrides)


def test_a_step_that_is_asked_to_stop_keeps_its_finished_samples_and_goes_on_with_them(folder):
    script = Script()
    script.delays = [600.0] * 3 + [0.0] * 5  # taken from the end: a group has one sample of two
    overrides = ["actor_rollout_ref.rollout.max_concurrency=2", "algorithm.dynamic_sampling.enable=false"]

    async def first(controller, servers):
        step = asyncio.create_task(controller.next_batch(1, 1))
        while len(controller.state_dict()["queue"]["finished"]) < 2 or sum(script.num_answers.values()) < 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        controller.stop_asked.set()
        with pytest.raises(Interrupted):
            await step
        return from_bytes(to_bytes(controller.state_dict()))

    state = run_in_folder(folder, first, script, overrides=overrides)
    finished = state["queue"]["finished"]
    unfinished = [each for each in state["queue"]["open"] if "samples" in each]
    num_kept = sum(len(each["samples"]) for each in (*finished, *unfinished))
    assert len(finished) == 2 and len(unfinished) == 2 and num_kept == 5

    async def second(controller, servers):
        controller.load_state_dict(state)
        batch = await controller.next_batch(1, 1)
        assert prompt_numbers(batch) == [0, 1, 2, 3] and batch.metrics["rollout/num_tokens"] == 16
        assert all(len(group.samples) == 2 for group in batch.groups)
        assert len(servers[0].requests) == 3

    run_in_folder(folder, second, overrides=overrides)


def test_a_controller_refuses_the_state_of_other_prompts_and_stays_as_it_was(folder):
    async def first(controller, servers):
        await controller.next_batch(1, 1)
        return from_bytes(to_bytes(controller.state_dict()))

    state = run_in_folder(folder, first)
    file = folder / "train.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))

    async def second(controller, servers):
        before = controller.state_dict()
        with pytest.raises(UserError, match="content of the prompts"):
            controller.load_state_dict(state)
        assert controller.state_dict() == before

    run_in_folder(folder, second)


def test_sample_responses_are_written_whole(folder):
    async def scenario(controller, servers):
        await controller.next_batch(3, 1)

    run_in_folder(folder, scenario, overrides=["actor_rollout_ref.rollout.dump_samples=2"])
    (path,) = (folder / "run" / "rollouts").iterdir()
    assert path.name == "step_000003.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["prompt"] == "p0" and second["prompt"] == "p1"
    assert [answer["text"] for answer in first["responses"]] == ["right", "wrong"]
    assert [answer["correct"] for answer in first["responses"]] == [True, False]
    assert first["responses"][0]["weight_versions"] == [1]

"""The controller's use of rewards: overlong responses, and failing reward functions."""

import json
import pickle

import pytest

from megatron_dapo.common.errors import UserError
from tests.fake_rollout import Script, prompt_numbers, run_in_folder, write_files

pytestmark = pytest.mark.unit


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

    keys = "algorithm.overlong_reward_shaping."
    overrides = [f"{keys}enable=true", f"{keys}buffer_len=4", f"{keys}penalty_factor=0.5"]
    run_in_folder(folder, scenario, Script(default=("right_long", "wrong")), overrides=overrides)


def test_a_reward_that_raises_costs_one_sample_and_is_counted(folder):
    write_files(folder, extra_info={"crash": True})

    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert batch.metrics["reward/num_exceptions"] == 4
        assert batch.groups[0].samples[1].reward_error.startswith("exception")

    run_in_folder(folder, scenario)


def _broken_rewards(folder, body):
    (folder / "fake_rewards.py").write_text(f"def score(data_source, response, ground_truth, extra_info):\n{body}\n")


SYNC_RAISES = "    return parse(response)\n\ndef parse(response):\n    raise LookupError('no such table')"
BROKEN_REWARDS = {
    "exception": SYNC_RAISES,
    "crash": "    import os; os._exit(3)",
    "timeout": "    raise TimeoutError",
}


@pytest.mark.parametrize("kind", BROKEN_REWARDS)
def test_a_reward_that_scores_no_response_ends_the_step_and_its_prompts_are_drawn_again(folder, kind):
    _broken_rewards(folder, BROKEN_REWARDS[kind])

    async def fails(controller, servers):
        before = controller.state_dict()
        with pytest.raises(UserError) as caught:
            await controller.next_batch(7, 1)
        assert controller.state_dict() == before
        with pytest.raises(UserError):
            await controller.evaluate(0, 1)
        return pickle.loads(pickle.dumps(caught.value)), before

    error, state = run_in_folder(
        folder, fails, overrides=[f"data.val_files=[{folder}/val.jsonl]", "reward.max_error_share=1.0"]
    )
    assert "rollout step 7: 8 of 8" in str(error) and f"({kind} 8)" in str(error) and "fake_rewards:score" in str(error)
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
        assert prompt_numbers(await controller.next_batch(7, 1)) == [0, 1, 2, 3]

    run_in_folder(folder, goes_on)


@pytest.mark.parametrize(("share", "stops"), [(0.5, False), (0.4, True), (1.0, False)])
def test_the_share_of_responses_without_a_verdict_that_ends_a_run_is_a_key(folder, share, stops):
    write_files(folder, extra_info={"crash": True})  # every second response

    async def scenario(controller, servers):
        if not stops:
            assert (await controller.next_batch(1, 1)).metrics["reward/num_exceptions"] == 4
            return
        with pytest.raises(UserError, match=r"reward.max_error_share = 0.4"):
            await controller.next_batch(1, 1)

    run_in_folder(folder, scenario, overrides=[f"reward.max_error_share={share}"])


GROUP_REWARD = """
def score(data_source, responses, ground_truth, extra_info):
    best = max(responses, key=len)
    return [{"score": responses.index(r) / 10 + (r == best), "correct": r.startswith("right")} for r in responses]
"""


def test_a_function_that_scores_a_prompts_responses_together_gets_all_of_them(folder):
    (folder / "fake_rewards.py").write_text(GROUP_REWARD)

    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        for group in batch.groups:
            rewards = [sample.raw_reward for sample in group.samples]
            assert sorted(rewards) in ([0.0, 1.1], [0.1, 1.0]), "each has its place among both, and the longer one 1"
            assert [sample.correct for sample in group.samples] == [reward < 1 for reward in rewards]
        assert (await controller.evaluate(1, 1))["val/num_prompts"] == 3

    val = ["data.val_files=[" + str(folder / "val.jsonl") + "]", "actor_rollout_ref.rollout.val_n=2"]
    run_in_folder(folder, scenario, Script(default=("right", "wrong_long")), overrides=val)


def test_remax_needs_the_reward_of_one_response(folder):
    (folder / "fake_rewards.py").write_text(GROUP_REWARD)
    with pytest.raises(UserError, match="scores the responses to a prompt together, but .*remax needs"):
        run_in_folder(
            folder,
            lambda controller, servers: None,
            overrides=["algorithm.adv_estimator=remax", "algorithm.dynamic_sampling.enable=false"],
        )


def test_rewards_are_reported_by_data_source_with_their_errors_and_what_sampling_waited_for_them(folder):
    rows = [
        {"prompt": f"p{number}", "label": "right", "data_source": "odd" if number % 2 else "even",
         "extra_info": {"crash": bool(number % 2)}}
        for number in range(20)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def scenario(controller, servers):
        metrics = (await controller.next_batch(1, 1)).metrics
        assert metrics["reward/odd/num_errors"] == 2 and metrics["reward/even/num_errors"] == 0
        assert metrics["reward/odd/mean"] == metrics["reward/even/accuracy"] == 0.5
        assert 0 < metrics["reward/wait_share"] <= 1

    run_in_folder(folder, scenario)

"""Groups made with scripted servers: what is asked of them, and what the samples say."""

import asyncio
import sys

import pytest

from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.plain_data import group_from_plain, group_to_plain
from tests.fake_rollout import FakeServer, Script, make_config, write_files

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path, num_val=2)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("fake_rewards", None)


class GreedyServer(FakeServer):
    """Answers greedy requests with a right, over-long response, the others with a wrong one."""

    def _answer(self, fields, aborted):
        greedy = fields["sampling_params"]["temperature"] == 0.0
        self.script.default = ("right_long",) if greedy else ("wrong",)
        return super()._answer(fields, aborted)


def with_estimator(config, name):
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"adv_estimator": name})})


def first_batch(folder, estimator, *overrides):
    """(the batch of step 1, every request's sampling parameters) without dynamic sampling."""

    async def scenario():
        server = await GreedyServer(Script()).start()
        sampling = "algorithm.dapo.dynamic_sampling.enable=false"
        controller = Controller(with_estimator(make_config(folder, [server], sampling, *overrides), estimator))
        try:
            await controller.start()
            batch = await controller.next_batch(1, 1)
            return batch, [request["sampling_params"] for request in server.requests]
        finally:
            await controller.close()
            await server.stop()

    return asyncio.run(scenario())


SHAPING = [
    "algorithm.dapo.overlong_reward_shaping.enable=true",
    "algorithm.dapo.overlong_reward_shaping.truncation_penalty=-0.25",
    "actor_rollout_ref.rollout.top_p=0.9",
]


def test_remax_groups_carry_the_shaped_reward_of_one_greedy_answer(folder):
    batch, requests = first_batch(folder, "remax", *SHAPING)
    assert [group.baseline_reward for group in batch.groups] == [0.75] * 4  # right 1, truncated -0.25
    assert [[sample.reward for sample in group.samples] for group in batch.groups] == [[0.0, 0.0]] * 4
    asked = sorted((request["temperature"], request["top_p"]) for request in requests)
    assert asked == [(0.0, 1.0)] * 4 + [(1.0, 0.9)] * 8
    assert batch.metrics["dapo/num_truncated_samples"] == 0  # the baseline is no sample
    assert [group_from_plain(group_to_plain(group)) for group in batch.groups] == list(batch.groups)


def test_other_estimators_ask_for_no_baseline(folder):
    batch, requests = first_batch(folder, "grpo", *SHAPING)
    assert len(requests) == 8
    assert [group.baseline_reward for group in batch.groups] == [None] * 4

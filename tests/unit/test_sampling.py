"""Groups made with scripted servers: the requests, and the contents of the samples."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.common.rollout_errors import RolloutError
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.samples import Group
from megatron_dapo.queue.plain_data import group_from_plain, group_to_plain
from megatron_dapo.queue.step_statistics import StepStatistics
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.rollout.trajectory import Budget
from megatron_dapo.servers.client import FOREIGN_VERSION, Generation, SamplingParams
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_error import ServerError
from tests.fake_rollout import WORDS, FakeServer, Script, make_config, write_files
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path, num_val=2)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("megatron_dapo.rollout.sampling._FIRST_PAUSE_S", 0.01)
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
        sampling = "algorithm.dynamic_sampling.enable=false"
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
    "algorithm.overlong_reward_shaping.enable=true",
    "algorithm.overlong_reward_shaping.truncation_penalty=-0.25",
    "actor_rollout_ref.rollout.top_p=0.9",
]


def test_remax_groups_carry_the_shaped_reward_of_one_greedy_answer(folder):
    batch, requests = first_batch(folder, "remax", *SHAPING)
    # right 1, truncated -0.25
    assert [group.baseline_reward for group in batch.groups] == [0.75] * 4
    assert [[sample.reward for sample in group.samples] for group in batch.groups] == [[0.0, 0.0]] * 4
    asked = sorted((request["temperature"], request["top_p"]) for request in requests)
    assert asked == [(0.0, 1.0)] * 4 + [(1.0, 0.9)] * 8
    assert batch.metrics["dapo/num_truncated_samples"] == 0  # the baseline is no sample
    assert [group_from_plain(group_to_plain(group)) for group in batch.groups] == list(batch.groups)


def test_a_response_whose_end_token_is_its_last_allowed_one_is_whole(folder):
    """As the server says: it looks for the end token before it looks at the length."""
    batch, _ = first_batch(folder, "grpo", *SHAPING, "data.max_response_length=2")
    samples = [sample for group in batch.groups for sample in group.samples]
    assert {(sample.num_response_tokens, sample.finish_reason) for sample in samples} == {(2, "stop")}
    assert all(sample.is_terminated and not sample.is_truncated for sample in samples)
    assert all(sample.reward == sample.raw_reward for sample in samples)


def test_other_estimators_ask_for_no_baseline(folder):
    batch, requests = first_batch(folder, "grpo", *SHAPING)
    assert len(requests) == 8
    assert [group.baseline_reward for group in batch.groups] == [None] * 4


ENVIRONMENT = """
from megatron_dapo.envs.environment import Observation

class TwoTurns:
    async def reset(self, task):
        self.task, self.num_turns = task, 0
        return Observation()

    async def step(self, response):
        self.num_turns += 1
        if self.num_turns == 1:
            return Observation(({"role": "user", "content": "p7"},))
        if self.task.prompt == "p2":
            raise ValueError("scripted")
        return Observation(done=True, reward=float(response == "right"))

    async def close(self):
        pass
"""
MULTI_TURN = [
    "algorithm.dynamic_sampling.enable=false",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.environment=two_turns:TwoTurns",
    "actor_rollout_ref.rollout.multi_turn.num_workers=4",
    "reward.function=environment",
]


class NextWord(FakeServer):
    """Answers "right", or "wrong" if the text so far is of prompt p3."""

    def _answer(self, fields, aborted):
        self.script.default = ("wrong",) if fields["input_ids"][0] == WORDS.index("p3") else ("right",)
        return super()._answer(fields, aborted)


def with_two_servers(folder, use, *overrides):
    """The result of `await use(controller, servers)`."""
    (folder / "two_turns.py").write_text(ENVIRONMENT)

    async def scenario():
        servers = [await NextWord(Script()).start() for _ in range(2)]
        controller = Controller(make_config(folder, servers, *MULTI_TURN, *overrides))
        try:
            await controller.start()
            return await use(controller, servers)
        finally:
            await controller.close()
            for server in servers:
                await server.stop()

    return asyncio.run(scenario())


def test_a_multi_turn_step_token_by_token_metric_by_metric(folder):
    async def use(controller, servers):
        for server in servers:
            server.hold.clear()
        step = asyncio.create_task(controller.next_batch(1, 1))
        # one of each environment: two at each server
        while sum(server.num_open for server in servers) < 4:
            await asyncio.sleep(0.01)
        for server in servers:
            server.hold.set()
        return await step, [[r["input_ids"] for r in server.requests] for server in servers]

    batch, requests = with_two_servers(folder, use)
    word, end, read = WORDS.index, WORDS.index("<eos>"), WORDS.index("p7")
    for prompt, group in zip(("p0", "p1", "p2", "p3"), batch.groups, strict=True):
        said = word("wrong" if prompt == "p3" else "right")
        for sample in group.samples:
            assert sample.prompt_tokens.tolist() == [word(prompt)]
            assert sample.response_tokens.tolist() == [said, end, read, said, end]
            assert sample.loss_mask.tolist() == [1, 1, 0, 1, 1]
            assert sample.rollout_log_probs.tolist() == [-0.5, -0.5, 0.0, -0.5, -0.5]
            assert sample.weight_versions.tolist() == [1] * 5
            assert sample.num_turns == 2
    finished, failed, wrong = batch.groups[0].samples[0], batch.groups[2].samples[0], batch.groups[3].samples[0]
    assert (finished.reward, finished.correct, finished.is_terminated) == (1, True, True)
    assert (finished.finish_reason, failed.finish_reason) == ("stop", "environment")
    assert (wrong.reward, wrong.correct, wrong.is_terminated, wrong.reward_error) == (0, False, True, None)
    assert (failed.reward, failed.correct, failed.is_terminated, failed.is_truncated) == (0, False, False, True)
    assert failed.reward_error == "environment: exception: ValueError: scripted"
    expected = {
        "rollout/num_turns_mean": 2, "rollout/num_env_failures": 2, "rollout/num_tokens": 8 * 4,
        "response_length/mean": 5, "dapo/num_truncated_samples": 2, "dapo/num_truncated_by_termination": 2,
        "dapo/num_truncated_by_length": 0, "reward/accuracy": 0.5, "reward/num_exceptions": 0,
    }  # fmt: skip
    assert {name: batch.metrics[name] for name in expected} == expected

    for sent in requests:  # each trajectory stays at the server with its beginning
        first = sorted(tokens[0] for tokens in sent if len(tokens) == 1)
        second = sorted(tokens[0] for tokens in sent if len(tokens) == 4)
        assert first == second and len(first) >= 2
    lines = (folder / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    (response, _) = json.loads(lines[0])["responses"]
    assert response["turns"] == [
        {"by": "model", "text": "right <eos>"},
        {"by": "environment", "text": "p7"},
        {"by": "model", "text": "right <eos>"},
    ]
    assert response["num_turns"] == 2
    assert [
        group_from_plain(json.loads(json.dumps(group_to_plain(group), default=np.ndarray.tolist)))
        for group in batch.groups
    ] == list(batch.groups)


def test_a_turn_whose_server_fails_is_sent_to_another_one_with_all_its_tokens(folder):
    async def use(controller, servers):
        servers[0].failures = [500] * 100
        batch = await controller.next_batch(1, 1)
        return batch, [sorted(len(r["input_ids"]) for r in server.requests) for server in servers]

    batch, (broken, whole) = with_two_servers(folder, use)
    # each turn was answered once, by the server that works
    assert whole == [1] * 8 + [4] * 8 and broken
    assert {sample.num_turns for group in batch.groups for sample in group.samples} == {2}
    assert batch.metrics["rollout/num_retries"] == len(broken)


def test_each_turn_has_a_seed_of_its_own_which_a_repeated_request_keeps(folder):
    async def use(controller, servers):
        servers[0].failures = [500] * 100
        await controller.next_batch(1, 1)
        return [[r["sampling_params"]["sampling_seed"] for r in server.requests] for server in servers]

    broken, whole = with_two_servers(folder, use)
    assert len(whole) == len(set(whole)) == 16 and broken and set(broken) <= set(whole)


def test_held_out_prompts_are_played_with_the_environment_too(folder):
    async def use(controller, servers):
        return await controller.evaluate(1, 1)

    metrics = with_two_servers(folder, use, f"data.val_files=[{folder}/val.jsonl]")
    assert metrics["val/num_turns_mean"] == 2 and metrics["val/accuracy"] == 1.0 and metrics["val/num_prompts"] == 2
    assert metrics["val/num_env_failures"] == 0


def test_limits_of_the_config_reach_the_trajectories(folder):
    async def use(controller, servers):
        return await controller.next_batch(1, 1)

    batch = with_two_servers(folder, use, "actor_rollout_ref.rollout.multi_turn.max_turns=1")
    samples = [sample for group in batch.groups for sample in group.samples]
    assert {(sample.num_turns, sample.finish_reason, sample.is_terminated) for sample in samples} == {
        (1, "turns", False)
    }
    assert batch.metrics["dapo/num_truncated_by_termination"] == 8


def test_an_environments_first_words_count_as_prompt():
    (group,) = synthetic_groups(64, num_groups=1, n=2)
    samples = [replace(sample, prompt_tokens=(*group.prompt.tokens, 5, 6, 7)) for sample in group.samples]
    statistics = StepStatistics()
    statistics.add(replace(group, samples=tuple(samples)))
    metrics = statistics.metrics()
    assert metrics["prompt_length/mean"] == len(group.prompt.tokens) + 3


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_server_took_for_no_answer_or_one_of_nobodys_weights_costs_the_trajectory_nothing(monkeypatch, fails):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("megatron_dapo.rollout.trajectory.time", clock)

    class Client:
        url, num_requests = "url", 0

        async def generate(self, *_):
            self.num_requests += 1
            if self.num_requests == 1:
                clock.now += 4.0
                if fails:
                    raise ServerError("url", "/generate", 500, "scripted")
                return Generation((1,), (0.0,), "stop", (FOREIGN_VERSION,))
            clock.now += 1.0
            return Generation((1,), (0.0,), "stop", (1,))

    server, budget = Server(Client()), Budget(10.0)

    @asynccontextmanager
    async def slot(avoid, prefer, is_first):
        yield server

    pool = SimpleNamespace(version=1, slot=slot, cache_salt=None, mark_behind=lambda *_: None)
    sampler = Sampler(pool, None, None, RolloutConfig(request_timeout_s=60.0, max_retries=1), 64)
    asyncio.run(sampler._generate(Group("uid", None), (1,), SamplingParams(1), budget))
    assert server.client.num_requests == 2 and budget.seconds_left == 9.0


def test_the_pause_between_retries_of_a_request_has_a_cap(monkeypatch):
    """Thousands of retries, as a config may allow, neither wait for days nor overflow."""
    pauses = []

    class Client:
        url = "url"

        async def generate(self, *_):
            raise ServerError("url", "/generate", 500, "scripted")

    async def pause(seconds):
        pauses.append(seconds)

    @asynccontextmanager
    async def slot(avoid, prefer, is_first):
        yield Server(Client())

    pool = SimpleNamespace(version=1, slot=slot, cache_salt=None)
    sampler = Sampler(pool, None, None, RolloutConfig(request_timeout_s=60.0, max_retries=2000), 64)
    monkeypatch.setattr("megatron_dapo.rollout.sampling.asyncio.sleep", pause)
    with pytest.raises(RolloutError, match="failed 2001 times"):
        asyncio.run(sampler._generate(Group("uid", None), (1,), SamplingParams(1), Budget()))
    assert len(pauses) == 2000 and pauses[:3] == [0.2, 0.4, 0.8] and pauses[-1] == max(pauses) == 30.0

"""Seeds: each request has its own, equal in runs of one seed; so have workers' generators."""

import asyncio
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.common.seeds import seed_from, seed_generators
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.samples import Group, PartialResponse
from megatron_dapo.envs.environment import Task
from megatron_dapo.envs.environment_pool import EnvironmentPool
from megatron_dapo.queue.plain_data import draw_from_plain, draw_to_plain
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import Generation, SamplingParams
from megatron_dapo.servers.server_command import sglang_command
from tests.config_overrides import mistakes
from tests.fake_rollout import Script, run_in_folder, write_files
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"
VALIDATED = [f"{ROLLOUT}.val_n=3", f"{ROLLOUT}.val_temperature=1.0"]


def seeds_of_a_run(folder, seed=1, steps=(1, 2), **script):
    """(input, seed) of every request of steps and their validations, over prompts that come again
    in each step."""

    async def scenario(controller, servers):
        for step in steps:
            await controller.next_batch(step, 1)
            await controller.evaluate(step, 1)
        requests = [fields for server in servers for fields in server.requests]
        return sorted((fields["input_ids"], fields["sampling_params"]["sampling_seed"]) for fields in requests)

    write_files(folder, num_prompts=4, num_val=2)
    overrides = [f"data.val_files=[{folder}/val.jsonl]", *VALIDATED, f"trainer.seed={seed}"]
    return run_in_folder(folder, scenario, Script(**script), overrides=overrides)


def test_no_two_requests_of_a_run_share_a_seed(folder):
    """Different within a group (SGLang would make one response of equal ones),
    and for a prompt drawn again."""
    asked = seeds_of_a_run(folder)
    assert len(asked) == 2 * (4 * 2 + 2 * 3) and len({seed for _, seed in asked}) == len(asked)
    assert all(0 <= seed < 2**63 for _, seed in asked)


def test_the_seeds_of_a_run_follow_from_its_seed(folder):
    first = seeds_of_a_run(folder)
    assert seeds_of_a_run(folder) == first
    other = seeds_of_a_run(folder, seed=2)
    assert [tokens for tokens, _ in other] == [tokens for tokens, _ in first]
    assert not {seed for _, seed in other} & {seed for _, seed in first}


def test_a_seed_is_the_same_on_every_machine():
    assert seed_from(1, "00000007-3", 2, 0) == 5472249176623142569
    assert len({seed_from(*parts) for parts in ((1, 23), (12, 3), ("1", 23), (1, "23"), (123,))}) == 5


class Servers:
    """A pool of one server that answers with the seed as a token;
    one request after the other is late."""

    def __init__(self, aborted=()):
        self.version, self.cache_salt, self.is_aborting, self.aborted, self.asked = 1, None, True, {*aborted}, []

    def slot(self, avoid, prefer, is_first):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    url = "url"

    async def generate(self, tokens, params, *_):
        number = len(self.asked)
        self.asked.append((list(tokens), params.sampling_seed))
        for _ in range(20 - number):  # the last one is the first to be there
            await asyncio.sleep(0)
        if number in self.aborted:
            return Generation((7, 8), (-0.5, -0.5), "abort", (1, 1), servers=("url",))
        return Generation((params.sampling_seed % 50,), (-0.5,), "stop", (1,), servers=("url",))


class Rewards:
    scores_groups = False

    async def score(self, *_):
        return SimpleNamespace(score=1.0, correct=True, error=None, answer=None)


class Tokenizer:
    def decode(self, tokens):
        return str(tokens)


def sampled(servers, group, n, elsewhere=(), partials=None, finished=None):
    sampler = Sampler(servers, Rewards(), Tokenizer(), RolloutConfig(request_timeout_s=60.0, max_retries=0), 64, seed=1)
    add, add_partial = (finished.append if finished is not None else print), (partials or []).append
    return asyncio.run(sampler.sample_group(group, n, SamplingParams(8), add, add_partial, elsewhere=elsewhere))


@pytest.fixture
def drawn():
    (group,) = synthetic_groups(64, num_groups=1)
    return replace(group, samples=(), version=1)


def test_responses_stand_in_a_group_by_their_numbers_whichever_is_there_first(drawn):
    servers, finished = Servers(), []
    group = sampled(servers, drawn, 4, finished=finished)
    assert [sample.number for sample in group.samples] == [0, 1, 2, 3]
    assert [sample.number for sample in finished] == [3, 2, 1, 0]
    expected = [seed_from(1, drawn.uid, number, 0) for number in range(4)]
    assert [seed for _, seed in servers.asked] == expected
    assert [sample.response_tokens.tolist() for sample in group.samples] == [[seed % 50] for seed in expected]


def test_what_an_interruption_left_goes_on_with_the_seeds_that_it_had(drawn):
    """Through the saved state: the finished, the unfinished and the waiting keep their numbers."""
    whole = sampled(Servers(), drawn, 4)
    servers, finished, partials = Servers(aborted={1, 2}), [], [None]
    with pytest.raises(Aborted):
        sampled(servers, drawn, 4, finished=finished, partials=partials)
    assert [(sample.number) for sample in finished] == [3, 0]
    assert [(response.number, response.tokens.tolist()) for response in partials[1:]] == [(2, [7]), (1, [7])]
    saved = replace(drawn, samples=tuple(finished), partials=tuple(partials[1:]))
    resumed = Servers()
    group = sampled(resumed, draw_from_plain(draw_to_plain(saved)), 4)
    assert [seed for _, seed in resumed.asked] == [seed_from(1, drawn.uid, number, 0) for number in (1, 2)]
    assert [tokens[-1] for tokens, _ in resumed.asked] == [7, 7]
    assert [sample.number for sample in group.samples] == [0, 1, 2, 3]
    kept = [group.samples[number].response_tokens.tolist() for number in (0, 3)]
    assert kept == [whole.samples[number].response_tokens.tolist() for number in (0, 3)]


def test_the_answers_that_there_are_keep_their_numbers_when_the_others_are_asked_for(drawn):
    servers = Servers()
    group = sampled(servers, drawn, 5, elsewhere={1, 4})
    assert [sample.number for sample in group.samples] == [0, 2, 3]
    assert [seed for _, seed in servers.asked] == [seed_from(1, drawn.uid, number, 0) for number in (0, 2, 3)]


def test_a_partial_response_of_a_state_keeps_its_number():
    saved = Group("uid", synthetic_groups(64)[0].prompt, partials=(PartialResponse((1,), (-0.5,), (0,), ("u",), 3),))
    assert draw_from_plain(draw_to_plain(saved)).partials[0].number == 3


# --------------------------------------------------------------------------------------- generators

DRAWING = """
import random
import numpy as np
from megatron_dapo.envs.environment import Observation

def score(data_source, response, ground_truth, extra_info):
    return random.random() + np.random.random()

class World:
    async def reset(self, task):
        return self.draw()
    async def step(self, response):
        return self.draw()
    def draw(self):
        return Observation(({"role": "user", "content": f"{random.random()} {np.random.random()}"},))
    async def close(self):
        pass
"""


@pytest.fixture
def drawing(tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_what_an_environment_draws_follows_from_the_trajectory(drawing):
    """Regardless of its process's earlier work."""

    async def play(pool, seed):
        async with pool.session(seed) as environment:
            words = [await environment.reset(Task("p", "", "", {})), await environment.step("a")]
            return [observation.messages[0]["content"] for observation in words]

    async def main():
        pool = EnvironmentPool("drawing:World", {}, 1, 30.0, memory_limit_mb=2048)
        await pool.start()
        try:
            return [await play(pool, seed) for seed in (1, 2, 1)]
        finally:
            await pool.close()

    first, other, again = asyncio.run(main())
    assert first == again and first[0] != first[1] and first[0] != other[0]


def test_what_a_reward_function_draws_follows_from_the_response(drawing):
    async def main(seed, *responses):
        pool = RewardPool("drawing:score", {}, 1, 30.0, 2048, seed=seed)
        await pool.start()
        try:
            return [(await pool.score("", response, "", {})).score for response in responses]
        finally:
            await pool.close()

    first, other, again = asyncio.run(main(1, "a", "b", "a"))
    assert first == again != other
    assert asyncio.run(main(1, "a")) == [first] != asyncio.run(main(2, "a"))


def test_the_generators_of_python_and_numpy_are_seeded_whatever_the_seed():
    for seed in (0, -3, 2**70):
        drawn = []
        for _ in range(2):
            seed_generators(seed)
            drawn.append((random.random(), np.random.random()))
        assert drawn[0] == drawn[1]


def test_what_a_rank_draws_follows_from_the_runs_seed():
    from megatron_dapo.platform.parallel import ParallelLayout

    def drawn(seed: int) -> tuple[float, float]:
        ParallelLayout.initialize(seed=seed)
        try:
            return random.random(), np.random.random()
        finally:
            ParallelLayout.shutdown()

    first, again, other = map(drawn, (1, 1, 2))
    assert first == again and not set(first) & set(other)


# ------------------------------------------------------------------------------------------ the key


def test_deterministic_cannot_go_with_servers_that_write_while_the_trainer_trains():
    sentences = mistakes("rollout.deterministic=true rollout.max_staleness=1")
    (sentence,) = (each for each in sentences if "deterministic" in each)
    assert (
        "deterministic is true" in sentence and "max_staleness 1 " in sentence and "set max_staleness to 0" in sentence
    )


@pytest.mark.parametrize(
    "answer", [{}, {"enable_deterministic_inference": False}, {"enable_deterministic_inference": 1}]
)
def test_a_given_server_that_samples_at_random_is_named_at_the_start(folder, answer, monkeypatch):
    async def info(self, request):
        from aiohttp import web

        return web.json_response(answer)

    monkeypatch.setattr("tests.fake_rollout.FakeServer._server_info", info)
    with pytest.raises(UserError, match=r"http://127.0.0.1:\d+ samples at random; start it with --enable-determ"):
        run_in_folder(folder, None, overrides=[f"{ROLLOUT}.deterministic=true"])


@pytest.mark.parametrize("key", [True, False])
def test_our_own_servers_have_deterministic_inference_where_the_key_says_so(tmp_path, key):
    model = make_tiny(tmp_path / "model", "qwen2", layers=1)
    config = load_config(None, [f"actor_rollout_ref.model.path={model}", f"{ROLLOUT}.deterministic={json.dumps(key)}"])
    command = sglang_command(config, "127.0.0.1", 1, []).command
    assert ("--enable-deterministic-inference" in command) == ("--chunked-prefill-size" in command) == key

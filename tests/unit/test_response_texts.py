"""Texts of responses: the same for rewards and people, and made for those who read them."""

import asyncio
import json
import sys

import pytest

from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import SamplingParams
from tests.fake_rollout import EOS, WORDS, Script, WritingServer, run_in_folder, write_files
from tests.unit.test_pushes_in_flight import AllRight, Words, draw, rollout
from tests.unit.test_sampling import with_two_servers

pytestmark = pytest.mark.unit

NOTING = """
def score(data_source, response, ground_truth, extra_info):
    with open({path!r}, "a") as file:
        file.write(response + "\\n")
    return {{"score": 1.0, "correct": response == "right"}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path, num_val=1)
    (tmp_path / "noting.py").write_text(NOTING.format(path=str(tmp_path / "rewarded")))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("noting", None)


@pytest.fixture
def decoded(monkeypatch):
    """The numbers of tokens of all texts that are made."""
    numbers = []
    decode = Tokenizer.decode

    def noted(self, tokens, skip_special_tokens=True):
        numbers.append(len(tokens))
        return decode(self, tokens, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    return numbers


def in_words(sample):
    return " ".join(WORDS[token] for token in sample.response_tokens if WORDS[token] != EOS)


def test_a_text_is_the_same_for_rewards_dumps_loggers_and_evaluations(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        rewarded = (folder / "rewarded").read_text().splitlines()
        await controller.evaluate(1, 1)
        return batch, rewarded

    overrides = [
        "actor_rollout_ref.rollout.dump_samples=2",
        "reward.function=noting:score",
        f"data.val_files=[{folder}/val.jsonl]",
    ]
    batch, rewarded = run_in_folder(folder, scenario, Script(default=("right", "wrong_long")), overrides=overrides)
    texts = [[in_words(sample) for sample in group.samples] for group in batch.groups]
    assert texts == [["right", " ".join(["wrong_long"] * 8)]] * 4
    assert sorted(rewarded) == sorted(text for group in texts for text in group)
    assert [[sample.response_text for sample in group.samples] for group in batch.groups[:2]] == texts[:2]
    lines = (folder / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    assert [[answer["text"] for answer in json.loads(line)["responses"]] for line in lines] == texts[:2]
    (held_out,) = (folder / "run/validation").iterdir()
    assert json.loads(held_out.read_text().splitlines()[0])["text"] in texts[0]


def test_a_text_that_nobody_reads_is_not_made(folder, decoded):
    """The environment reads the turns, each of two tokens, and gives the reward of the whole."""

    async def use(controller, servers):
        return await controller.next_batch(1, 1)

    batch = with_two_servers(folder, use, "actor_rollout_ref.rollout.dump_samples=0")
    samples = [sample for group in batch.groups for sample in group.samples]
    assert decoded == [2] * 16 and {sample.num_response_tokens for sample in samples} == {5}
    assert {sample.response_text for sample in samples} == {""}


def test_responses_of_before_a_stop_are_scored_again_by_their_own_texts():
    asked = []

    class Together(AllRight):
        scores_groups = True

        async def score_group(self, source, texts, *_):
            asked.append(texts)
            return [RewardResult(1.0, True)] * len(texts)

    async def scenario():
        server = WritingServer(lambda: 3, token_s=0.001)
        async with rollout(server) as (pool, sampler):
            before = await sampler.sample_group(draw(0, version=1), 1, SamplingParams(50))
            together = Sampler(pool, Together(), Words(), RolloutConfig(), len(WORDS))
            await together.sample_group(before, 2, SamplingParams(50))

    asyncio.run(scenario())
    assert asked == [[f"right right {EOS}"] * 2]

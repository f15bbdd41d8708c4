"""Scores of a reward model: their combination, the cost of failures,
and the demands on its config."""

import asyncio
import json
from pathlib import Path

import pytest

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.scorers import Scorers, WeightedScorer
from megatron_dapo.rollout import reward_model_client as reward_model
from megatron_dapo.rollout.build_rollout import make_reward_model
from megatron_dapo.rollout.reward_model_client import RewardModel
from megatron_dapo.servers.server_error import ServerError

pytestmark = pytest.mark.unit

RIGHT = RewardResult(1.0, True, answer="46")


class Characters:
    """A token per character; the prompt's end is 0."""

    def encode_answered(self, messages, response):
        if response == "unspeakable":
            raise ValueError("the model's chat template refuses it")
        return (*map(ord, messages), 0, *map(ord, response))


class Client:
    """Scores a response by its length, except for a test's script: exceptions and answers,
    one per request."""

    url = "http://one:1"

    def __init__(self, *script):
        self.script = list(script)
        self.batches = []

    async def post(self, route, fields):
        assert route == "/classify"
        batch = fields["input_ids"]
        self.batches.append(len(batch))
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            return step
        return [{"embedding": [float(len(tokens) - tokens.index(0) - 1)]} for tokens in batch]

    async def close(self):
        pass


def config(*keys: str) -> Config:
    return load_config(None, ["reward.model.path=somewhere", "reward.function=math_verify", *keys])


def scores(client, *responses, verdict=RIGHT, keys=(), down_timeout_s=20.0) -> list[RewardResult]:
    async def scenario():
        reward = config(*keys).reward
        model = RewardModel(Characters(), client, down_timeout_s)
        scorers = Scorers(reward, [WeightedScorer(model, reward.model.weight)])
        prompt = Prompt(0, "key", (1,), "p", "any", "46", messages="p")
        try:
            return await asyncio.gather(*(scorers.combined(verdict, prompt, response) for response in responses))
        finally:
            await scorers.close()

    return asyncio.run(scenario())


def test_scores_are_added_or_replace_the_rules_and_decide_correctness_without_a_rule():
    assert scores(Client(), "abc") == [RewardResult(4.0, True)]
    assert scores(Client(), "abc", keys=["reward.model.weight=0.5"]) == [RewardResult(2.5, True)]
    assert scores(Client(), "abc", keys=["reward.combine=model"]) == [RewardResult(3.0, True)]
    none = RewardResult(0.0, False)
    alone = scores(Client(), "abc", "", verdict=none, keys=["reward.function=none"])
    assert alone == [RewardResult(3.0, True), RewardResult(0.0, False)]
    assert scores(Client(), "abc")[0].answer == "46"


def test_responses_that_wait_go_in_batches_and_one_without_a_verdict_is_not_asked_about():
    client = Client()
    results = scores(client, *("a" * number for number in range(40)))
    assert [result.score - 1 for result in results] == list(range(40)) and client.batches == [32, 8]
    failed = RewardResult(-1.0, False, error="timeout")
    assert scores(client, "abc", verdict=failed) == [failed] and len(client.batches) == 2


def test_a_server_that_is_down_is_awaited_and_costs_the_verdict_if_it_stays_down(monkeypatch):
    monkeypatch.setattr(reward_model, "_PAUSE_S", 0.001)
    down = ServerError("http://one:1", "/classify", None, "refused")
    assert scores(Client(down, ServerError("u", "r", 503, "starts"), down), "abc") == [RewardResult(4.0, True)]
    [lost] = scores(Client(*[down] * 1000), "abc", down_timeout_s=0.05)
    assert not lost.correct and lost.error.startswith("crash: ") and "refused" in lost.error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ServerError("u", "/classify", 400, "too long"), "too long"),
        ([], "0 finite scores for 1 responses"),
        ([{"embedding": [float("nan")]}], "0 finite scores"),
        ({"text": "I am a language model"}, "0 finite scores"),
        ([{"embedding": [0.1, 0.2]}], "0 finite scores"),
        ([{"embedding": {"0": 1.0}}], "0 finite scores"),
        ([{"embedding": ["high"]}], "0 finite scores"),
        (None, "0 finite scores"),
    ],
)
def test_what_is_no_score_costs_the_verdict_at_once(answer, words):
    client = Client(answer)
    [result] = scores(client, "abc")
    assert result.error.startswith("exception: ") and words in result.error and client.batches == [1]


def test_in_a_batch_one_response_that_the_server_refuses_costs_only_itself():
    refused = ServerError("u", "/classify", 400, "too long")
    client = Client(refused, refused)
    results = scores(client, "abc", "d", "ef")
    assert [result.error is None for result in results] == [False, True, True] and client.batches == [3, 1, 1, 1]


def test_a_response_that_the_models_chat_template_refuses_costs_only_itself():
    client = Client()
    refused, scored = scores(client, "unspeakable", "abc")
    assert refused.error == "exception: reward.model.path: the model's chat template refuses it"
    assert scored == RewardResult(4.0, True) and client.batches == [1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ServerError("u", "/classify", 400, "no embedding model"), "no embedding model"),
        ([{"embedding": [0.5] * 1024}], "0 finite scores for 1 responses"),
    ],
)
def test_a_server_without_a_classifier_is_refused_at_the_start(answer, words):
    class Healthy(Client):
        async def wait_healthy(self, timeout_s):
            pass

    async def start(client):
        model = RewardModel(Characters(), client, 20.0)
        try:
            await model.start(1.0)
        finally:
            await model.close()

    asyncio.run(start(Healthy()))
    with pytest.raises(UserError, match=f"reward.model.url is http://one:1, but .*{words}.*serve the classifier"):
        asyncio.run(start(Healthy(answer)))


def folder(path: Path, **config_json) -> str:
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    (path / "config.json").write_text(json.dumps(config_json))
    return str(path)


def test_a_classifier_of_one_label_and_a_critic_are_reward_models(tmp_path):
    one = {"0": "LABEL_0"}
    good = folder(tmp_path / "good", architectures=["Qwen2ForSequenceClassification"], id2label=one)
    critic = folder(tmp_path / "critic", architectures=["Qwen2ForTokenClassification"], num_labels=1)
    assert architecture_of(good).startswith("Qwen2ForSeq") and architecture_of(critic).startswith("Qwen2ForTok")
    unlabelled = folder(tmp_path / "two", architectures=["Qwen2ForSequenceClassification"])
    with pytest.raises(UserError, match="a classifier of 2 labels"):
        load_and_validate(None, ["reward.function=math_verify", f"reward.model.path={unlabelled}"])


def test_who_starts_no_server_must_be_given_one():
    with pytest.raises(UserError, match="launch.local"):
        make_reward_model(config())
    assert make_reward_model(load_config(None, [])) is None

"""A reward model on the real SGLang: its scores are transformers', and a server that dies loses no response."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema import Config
from megatron_dapo.data.types import Prompt
from megatron_dapo.rewards.types import RewardResult
from megatron_dapo.rollout.controller import make_scorers
from megatron_dapo.rollout.run_servers import RunServers
from tests.tiny_models import EOS_ID, PAD_ID, make_tokenizer

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "12+34="}]
RESPONSES = ["46", "47", "6+40=46", "4" * 40]
BOUND = 1e-5  # float32: a few roundings of 6e-8 in each of 2 layers, of scores of order 1


def make_classifier(path: Path, bias: float | None) -> Path:
    """A random classifier over characters; with a bias it is what a critic of ours exports."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=80, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=PAD_ID, eos_token_id=EOS_ID, num_labels=1,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).float().save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }},{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(path)
    if bias is not None:
        weights = load_file(path / "model.safetensors")
        save_file({**weights, "score.bias": torch.tensor([bias])}, path / "model.safetensors", {"format": "pt"})
        config_json = json.loads((path / "config.json").read_text())
        named = config_json | {"architectures": ["Qwen2ForTokenClassification"]}
        (path / "config.json").write_text(json.dumps(named))
    return path


BIAS = {"classifier": None, "critic": 0.25}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request) -> Iterator[tuple[Config, RunServers, float]]:
    """(a config that names the running server, what keeps it alive, the bias of the model's head)."""
    folder = tmp_path_factory.mktemp("reward_model")
    model = make_classifier(folder / "model", BIAS[request.param])
    keys = [
        f"reward.model.path={model}",
        "reward.model.weight=2.0",
        f"trainer.run_dir={folder}/run",
        "actor_rollout_ref.rollout.server.startup_timeout_s=300.0",
        "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]",  # of the rollout there is none
    ]
    servers = RunServers(load_config(None, keys), folder)
    servers.start()
    try:
        while not servers.check():
            pass
        yield load_config(None, [*keys, *servers.overrides()]), servers, BIAS[request.param] or 0.0
    finally:
        servers.stop()


def expected_scores(path: str) -> list[float]:
    """transformers' scores, without the bias that its sequence classifiers do not have."""
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    scores = []
    for response in RESPONSES:
        messages = [*MESSAGES, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            scores.append(model(**tokens).logits[0, 0].item())
    return scores


async def combined(config: Config, verdict: RewardResult) -> list[RewardResult]:
    scorers = make_scorers(config)
    prompt = Prompt(0, "key", (1,), "", "any", "46", messages=MESSAGES)
    await scorers.start(60.0)
    try:
        return await asyncio.gather(*(scorers.combined(verdict, prompt, response) for response in RESPONSES))
    finally:
        await scorers.close()


@pytest.mark.parametrize("served", BIAS, indirect=True)
def test_scores_are_those_of_transformers_and_are_added_to_the_rules(served):
    config, _, bias = served
    results = asyncio.run(combined(config, RewardResult(1.0, True)))
    for result, expected in zip(results, expected_scores(config.reward.model.path), strict=True):
        assert abs(result.score - (1.0 + 2.0 * (expected + bias))) < 2 * BOUND
        assert result.correct and result.error is None


@pytest.mark.parametrize("served", ["critic"], indirect=True)
def test_a_server_that_dies_is_started_again_and_every_response_gets_its_score_once(served):
    config, servers, _ = served
    before = asyncio.run(combined(config, RewardResult(0.0, False)))

    async def through_a_kill() -> list[RewardResult]:
        [pid] = servers._reward_model.pids()
        os.kill(pid, signal.SIGKILL)
        asking = asyncio.create_task(combined(config, RewardResult(0.0, False)))
        while not asking.done():
            await asyncio.to_thread(servers.check)
            await asyncio.sleep(0.1)
        return await asking

    after = asyncio.run(through_a_kill())
    assert [result.error for result in after] == [None] * len(RESPONSES)
    assert [round(result.score, 4) for result in after] == [round(result.score, 4) for result in before]

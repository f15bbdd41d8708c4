"""A reward model on the real SGLang: transformers' scores,
and no response lost with a dying server."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.build_rollout import make_scorers
from megatron_dapo.servers.run_servers import RunServers
from tests.forked_servers import forked_servers
from tests.tiny_models import make_tiny_classifier

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "12+34="}]
RESPONSES = ["46", "47", "6+40=46", "4" * 40]
BOUND = 1e-5  # float32: a few roundings of 6e-8 in each of 2 layers, of scores of order 1


FAMILIES: tuple[Literal["qwen2", "qwen3", "llama"], ...] = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True)
class Served:
    """A running server of a classifier from the folder `model`. config: names it."""

    model: Path
    config: Config
    servers: RunServers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """By family; they start together."""
    folder = tmp_path_factory.mktemp("reward_models")
    made = {}
    with forked_servers(), ExitStack() as running:
        for family in FAMILIES:
            model = make_tiny_classifier(folder / family, family)
            keys = [
                f"reward.model.path={model}",
                "reward.model.weight=2.0",
                f"trainer.run_dir={folder}/run_{family}",
                "actor_rollout_ref.rollout.server.startup_timeout_s=300.0",
                # the rollout has none
                "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]",
            ]
            servers = RunServers.of(load_config(None, keys), folder / f"run_{family}")
            made[family] = Served(model, load_config(None, [*keys, *servers.overrides()]), servers)
            running.callback(servers.stop)
            servers.start()
        while not all([each.servers.check() for each in made.values()]):
            time.sleep(0.2)
        yield made


def expected_scores(path: Path) -> list[float]:
    """transformers' scores of the last token, in the chat template
    of the classifier's own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    is_critic = "Token" in json.loads((path / "config.json").read_text())["architectures"][0]
    kind = AutoModelForTokenClassification if is_critic else AutoModelForSequenceClassification
    model = kind.from_pretrained(path, num_labels=1).double().eval()
    scores = []
    for response in RESPONSES:
        messages = [*MESSAGES, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            scores.append(model(**tokens).logits.flatten()[-1].item())
    return scores


async def combined(config: Config, verdict: RewardResult) -> list[RewardResult]:
    scorers = make_scorers(config)
    prompt = Prompt(0, "key", (1,), "", "any", "46", messages=MESSAGES)
    await scorers.start(60.0)
    try:
        return await asyncio.gather(*(scorers.combined(verdict, prompt, response) for response in RESPONSES))
    finally:
        await scorers.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_and_are_added_to_the_rules(served, family):
    results = asyncio.run(combined(served[family].config, RewardResult(1.0, True)))
    expected = expected_scores(served[family].model)
    assert max(expected) - min(expected) > 0.1, "the responses can be told apart"
    for result, score in zip(results, expected, strict=True):
        assert abs(result.score - (1.0 + 2.0 * score)) < 2 * BOUND
        assert result.correct and result.error is None


def test_a_server_that_dies_is_started_again_and_a_critics_head_has_its_bias(served):
    """Its second start is from a critic, as a run exports it:
    so the scores are those of the new start."""
    model, config, servers = (getattr(served["qwen2"], name) for name in ("model", "config", "servers"))
    make_tiny_classifier(model, "qwen2", bias=0.25, seed=1)

    async def through_a_kill() -> list[RewardResult]:
        [pid] = servers.pids()
        os.kill(pid, signal.SIGKILL)
        asking = asyncio.create_task(combined(config, RewardResult(0.0, False)))
        while not asking.done():
            await asyncio.to_thread(servers.check)
            await asyncio.sleep(0.1)
        return await asking

    results = asyncio.run(through_a_kill())
    assert [result.error for result in results] == [None] * len(RESPONSES)
    for result, score in zip(results, expected_scores(model), strict=True):
        assert abs(result.score - 2.0 * score) < 2 * BOUND

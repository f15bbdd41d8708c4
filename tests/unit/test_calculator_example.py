"""The calculator example's own parts: base model, problems, demonstrations, reward, config."""

import asyncio
import json
import random

import pytest
import torch

from examples.calculator import pretrain, problems
from examples.calculator.reward import score
from examples.character_model import EOS, IGNORED, MANIFEST, VOCABULARY, batch
from megatron_dapo.checks.model_checks import read_model_json
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.config.loader import load_config
from megatron_dapo.envs.environment_registry import make

pytestmark = pytest.mark.unit


@pytest.fixture
def config(tmp_path):
    files = problems.write_files(tmp_path)
    named = [f"data.{key}=[{path}]" for key, path in zip(("train_files", "val_files"), files, strict=True)]
    return load_config("configs/calculator.yaml", named)


def test_the_recipe_is_free_of_mistakes_with_its_model_and_files(config):
    validate(config, read_model_json(config))


def test_the_base_model_calls_the_tool_now_and_then():
    manifest = json.loads((pretrain.BASE / MANIFEST).read_text())
    # partial success: the start of training
    assert 0.1 < manifest["held_out"]["right_calls_sampled"] < 0.4


def test_demonstrations_show_what_the_environment_of_the_recipe_answers(config):
    """Each tool result in a demonstration is the environment's own answer;
    only the computed kind is right."""
    keys, draw = config.actor_rollout_ref.rollout.multi_turn, random.Random(0)
    environment = make(keys.environment, keys.environment_kwargs)
    verdicts = {}
    for problem in problems.split()[0][:20]:
        for kind, demonstrate in pretrain.DEMONSTRATIONS.items():
            turns = demonstrate(problem, draw)
            for (own, text), following in zip(turns, [*turns[1:], None], strict=True):
                if own:
                    answer = asyncio.run(environment.step(text))
                    assert answer.done == (following is None)
                    assert [message["content"] for message in answer.messages] == ([following[1]] if following else [])
            text = "".join(text for _, text in turns)
            verdicts.setdefault(kind, set()).add(score("", text, problem.answer, {}))
    right = {"computed": {1.0}}
    assert verdicts == {kind: right.get(kind, {0.0}) for kind in pretrain.DEMONSTRATIONS}


def test_only_what_the_model_writes_is_a_target():
    problem = problems.Product(12, 34)
    tokens, targets = batch([(problem, pretrain.computed(problem))])
    end = VOCABULARY[EOS]
    text = [VOCABULARY[c] for c in "12*34?(12*34)"] + [end] + [VOCABULARY[c] for c in "=408;408"] + [end]
    assert tokens[0].tolist() == text
    own = [False] * 6 + [True] * 8 + [False] * 5 + [True] * 4
    expected = [token if is_own else IGNORED for token, is_own in zip(text[1:], own[1:], strict=True)]
    assert targets[0].tolist() == [*expected, IGNORED]
    assert torch.equal(tokens != 0, torch.ones_like(tokens, dtype=torch.bool))

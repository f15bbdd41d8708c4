"""The calculator example's own parts: base model, problems, demonstrations, reward, config."""

import asyncio
import json
import random

import pytest
import torch

from examples.arithmetic.pretrain import EOS, MANIFEST, VOCABULARY, sha256
from examples.calculator import pretrain, problems
from examples.calculator.reward import score
from megatron_dapo.config import load_config, read_model_json, validate
from megatron_dapo.envs.registry import make

pytestmark = pytest.mark.unit


@pytest.fixture
def config(tmp_path):
    files = problems.write_files(tmp_path)
    named = [f"data.{key}=[{path}]" for key, path in zip(("train_files", "val_files"), files, strict=True)]
    return load_config("configs/calculator.yaml", named)


def test_the_recipe_is_free_of_mistakes_with_its_model_and_files(config):
    validate(config, read_model_json(config))


def test_the_committed_base_model_is_what_the_script_wrote_with_its_settings():
    manifest = json.loads((pretrain.BASE / MANIFEST).read_text())
    assert manifest["settings"] == json.loads(json.dumps(pretrain.asdict(pretrain.Settings())))
    written = {path.name: sha256(path) for path in pretrain.BASE.iterdir() if path.name != MANIFEST}
    assert manifest["sha256"] == written
    assert 0.1 < manifest["held_out"]["right_calls_sampled"] < 0.4  # partial success: what training starts from


def test_the_script_still_makes_a_model_that_learns():
    losses = []
    pretrain.train(pretrain.Settings(steps=12, batch_size=8), lambda step, loss: losses.append(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_demonstrations_show_what_the_environment_of_the_recipe_answers(config):
    """Each tool result in a demonstration is the environment's own answer; only the computed kind is right."""
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
    tokens, targets = pretrain.batch([(problem.prompt, pretrain.computed(problem))])
    end = VOCABULARY[EOS]
    text = [VOCABULARY[c] for c in "12*34?(12*34)"] + [end] + [VOCABULARY[c] for c in "=408;408"] + [end]
    assert tokens[0].tolist() == text
    own = [False] * 6 + [True] * 8 + [False] * 5 + [True] * 4
    expected = [token if mine else pretrain.IGNORED for token, mine in zip(text[1:], own[1:], strict=True)]
    assert targets[0].tolist() == [*expected, pretrain.IGNORED]
    assert torch.equal(tokens != 0, torch.ones_like(tokens, dtype=torch.bool))


def test_prompt_files_are_reproducible_and_held_out_problems_are_not_trained_on(tmp_path):
    first, again = problems.write_files(tmp_path / "a"), problems.write_files(tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in first]
    train, val = ({row["prompt"][0]["content"] for row in file} for file in rows)
    assert not train & val and len(val) == problems.NUM_HELD_OUT

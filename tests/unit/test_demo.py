"""The demos' own parts: base model, problems, rewards, recipes."""

import json
import random
from dataclasses import replace

import pytest

from examples.arithmetic import pretrain, sft
from examples.arithmetic import problems as sums
from examples.arithmetic.reward import score
from examples.calculator import pretrain as calculator
from examples.calculator import problems as calls
from examples.character_model import EOS, MANIFEST, demonstration, is_made, save, sha256, tokenizer, train
from examples.smollm2 import problems as products
from examples.smollm2.reward import last_number
from megatron_dapo.checks.model_checks import read_model_json
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.conversations import ConversationSet
from megatron_dapo.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.unit

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("script", [pretrain, calculator])
def test_the_committed_base_model_is_what_the_script_wrote_with_its_settings(script):
    assert is_made(script.BASE, script.SETTINGS)
    assert not is_made(script.BASE, replace(script.SETTINGS, seed=2))
    manifest = json.loads((script.BASE / MANIFEST).read_text())
    assert manifest["sha256"] == {path.name: sha256(path) for path in script.BASE.iterdir() if path.name != MANIFEST}


@pytest.mark.parametrize(("script", "problems"), [(pretrain, sums), (calculator, calls)])
def test_the_script_still_makes_a_model_that_learns_and_can_be_loaded(script, problems, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = []
    settings = replace(script.SETTINGS, steps=12, batch_size=8)
    model = train(settings, script.DEMONSTRATIONS, problems.split()[0], lambda step, loss: losses.append(loss))
    save(model, settings, tmp_path, lambda model: {})
    assert losses[-1] < 0.8 * losses[0]

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer) == 64
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_base_model_knows_the_right_way_but_rarely_takes_it():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sums.BASE, dtype="float32").eval()
    greedy = pretrain.accuracy(model, sums.split()[1], sample=False)
    assert 0.15 < greedy < 0.4  # so that training can more than double it


def test_tokenizer_keeps_every_character():
    characters = tokenizer()
    text = "45+38=5+8+0=13,4+3+1=8:83 let me see"
    assert characters.decode(characters.encode(text)) == text
    assert len(characters.encode(text)) == len(text)


@pytest.mark.parametrize("a, b", [(45, 38), (99, 99), (10, 10), (50, 50), (19, 81)])
def test_worked_demonstrations_are_right_and_guesses_wrong(a, b):
    problem = sums.Sum(a, b)
    draw = random.Random(0)
    shown = {kind: demonstrate(problem, draw) for kind, demonstrate in pretrain.DEMONSTRATIONS.items()}
    scores = {kind: score("arithmetic", text, str(a + b), {}) for kind, ((_, text),) in shown.items()}
    assert scores == {"right": 1.0, "wrong": 0.0, "worked": 1.0, "slipped": 0.0, "rambling": 0.0}


def test_worked_example_in_the_docstring():
    assert pretrain.worked(sums.Sum(45, 38)) == "5+8+0=13,4+3+1=8:83"


@pytest.mark.parametrize("problems", [sums, calls, products])
def test_prompt_files_are_reproducible_and_held_out_problems_are_not_trained_on(problems, tmp_path):
    first, again = problems.write_files(tmp_path / "a"), problems.write_files(tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    train, val = ([json.loads(line) for line in path.read_text().splitlines()] for path in first)
    questions = [{row["prompt"][0]["content"] for row in rows} for rows in (train, val)]
    assert not questions[0] & questions[1]
    assert len(val) == problems.NUM_HELD_OUT == len(questions[1])


@pytest.mark.parametrize(
    ("response", "reward"),
    [("4 * 7 = 28", 1), ("28.", 1), ("It is 4 * 7", 0), ("", 0), ("128", 0), ("2,8", 0), ("28 or 27", 0)],
)
def test_last_number_is_the_answer(response, reward):
    assert last_number("products", response, "28", {}) == reward


def test_the_demonstrations_to_fine_tune_on_are_those_of_the_base_model(tmp_path):
    """The same every time, in the mixture of pretrain.py,
    each with sampling's end-of-text token."""
    learned, held_out = sums.split()
    settings = pretrain.SETTINGS
    paths = [sft.write_demonstrations(tmp_path / name, learned, 400, settings) for name in ("a.jsonl", "b.jsonl")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    prompts = {json.loads(line)["prompt"] for line in paths[0].read_text().splitlines()}
    assert not prompts & {problem.prompt for problem in held_out}

    files = [f"data.train_files=[{paths[0]}]", f"actor_rollout_ref.model.path={sums.BASE}"]
    config = load_config("configs/sft_demo.yaml", files)
    validate(config, read_model_json(config))
    tokenizer = load_tokenizer(sums.BASE)
    loaded = ConversationSet.load(config.data.train_files, config, tokenizer)
    assert len(loaded.samples) == 400
    draw = random.Random(settings.seed)
    for sample in loaded.samples:
        problem, ((_, response),) = demonstration(settings, pretrain.DEMONSTRATIONS, learned, draw)
        assert tokenizer.decode(sample.tokens, skip_special_tokens=False) == f"{problem.prompt}{response}{EOS}"
        assert sample.loss_mask.sum() == len(response) + 1


def recipe(name: str, tmp_path, *overrides: str):
    train, val = sums.write_files(tmp_path)
    files = [f"data.train_files=[{train}]", f"data.val_files=[{val}]"]
    config = load_config(f"configs/{name}.yaml", [*files, *overrides])
    validate(config, read_model_json(config))
    return config


@pytest.mark.parametrize("name", ["demo", "demo_llm"])
def test_recipes_have_all_four_techniques_on_and_two_mini_batches(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    overrides = [f"actor_rollout_ref.model.path={tmp_path}"] if name == "demo_llm" else []
    config = recipe(name, tmp_path, *overrides)
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    assert actor.use_dapo and actor.clip_ratio_high > actor.clip_ratio_low
    assert actor.loss_agg_mode == "token-mean"
    assert algorithm.dynamic_sampling.enable and algorithm.dynamic_sampling.filter_mode == "strict"
    assert algorithm.overlong_reward_shaping.enable and algorithm.overlong_reward_shaping.buffer_len > 0
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size
    assert config.weight_sync.verify


def test_the_demo_runs_tensor_and_sequence_parallel(tmp_path):
    megatron = recipe("demo", tmp_path).actor_rollout_ref.actor.megatron
    assert megatron.tensor_model_parallel_size == 2 and megatron.sequence_parallel

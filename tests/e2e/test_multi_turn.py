"""Several turns with a tool, from end to end: a real server, environments in their processes,
learning on the CPU.

One environment hangs once, burning CPU, and costs one trajectory. Every dumped trajectory is
checked token by token.
"""

import json
import os
import re
from fractions import Fraction
from itertools import groupby

import pytest

from examples.calculator.demo import DEMO
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import assemble
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.helpers import REPOSITORY
from tests.proofs import amount, proof

pytestmark = pytest.mark.e2e

NUM_STEPS = amount(4, 12)
VOCABULARY = json.loads((REPOSITORY / "examples/calculator/base/tokenizer.json").read_text())["model"]["vocab"]
CHARACTERS = {index: char for char, index in VOCABULARY.items()}
END = VOCABULARY["<eos>"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("calculator")
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    run_here(
        DEMO.run,
        f"{multi_turn}.environment=tests.stuck_calculator:StuckCalculator",
        f"{multi_turn}.environment_kwargs.marker={folder}/stuck",
        f"{multi_turn}.step_timeout_s=8.0",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.dump_batches=true",
        f"trainer.run_dir={folder}/run",
    )
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def metrics(run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def batches(run):
    return [read_batch(run.batches, step) for step in range(1, NUM_STEPS + 1)]


def steps(metrics: list[dict]) -> list[dict]:
    return [line for line in metrics if "actor/loss" in line]


def samples(batches):
    return [sample for batch in batches for group in batch.groups for sample in group.samples]


def spelled(tokens) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


def results_of(turn: str) -> str:
    """The tool's answer to a turn, computed here: exact products and the like,
    or the beginning of an error."""
    answers = []
    for call in (part.partition(")")[0] for part in turn.split("(")[1:]):
        product = re.fullmatch(r"(\d+)\*(\d+)", call)
        answers.append(f"={Fraction(product[1]) * Fraction(product[2])};" if product else None)
    return "" if None in answers else "".join(answers)


@proof
def test_the_model_learns_to_call_the_tool(metrics):
    rewards = [line["reward/mean"] for line in steps(metrics)]
    turns = [line["rollout/num_turns_mean"] for line in steps(metrics)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
    assert turns[0] < 1.6 and sum(turns[-4:]) / 4 > 1.8
    before, *_, after = [line for line in metrics if "val/accuracy" in line]
    assert after["val/accuracy"] >= max(0.8, before["val/accuracy"] + 0.3)
    assert after["val/num_turns_mean"] > before["val/num_turns_mean"]


def test_masks_and_turn_counts_token_by_token(batches):
    """The oracle knows the characters, the end token, products and the limits of the config, and no
    code of ours."""
    num_checked = num_two_turns = 0
    for sample in samples(batches):
        tokens, mask = sample.response_tokens, sample.loss_mask
        assert 0 < len(tokens) <= 40
        assert len(mask) == len(sample.rollout_log_probs) == len(sample.weight_versions) == len(tokens)
        parts = [
            (own, [token for token, _ in part]) for own, part in groupby(zip(tokens, mask, strict=True), lambda x: x[1])
        ]
        # begins and ends with the model
        assert [own for own, _ in parts] == [1, 0] * (len(parts) // 2) + [1]
        assert sample.num_turns == len(parts) // 2 + 1
        for position, (own, part) in enumerate(parts):
            if own:
                assert END not in part[:-1]  # one turn ends at its end token
                last = position == len(parts) - 1
                assert part[-1] == END or len(part) == 20 or (last and len(tokens) == 40)
                assert last or "(" in spelled(part)  # only a call is followed by the tool's words
            else:
                text, expected = spelled(part), results_of(spelled(parts[position - 1][1]))
                assert text == expected if expected else re.fullmatch(r"(=[^=;]*;)+", text)
                num_checked += bool(expected)
        for log_prob, own in zip(sample.rollout_log_probs, mask, strict=True):
            assert log_prob <= 0.0 and (own or log_prob == 0.0)
        if sample.finish_reason == "stop":
            assert "(" not in spelled(parts[-1][1]) and sample.is_terminated
        num_two_turns += sample.num_turns == 2
    assert min(num_checked, num_two_turns) > amount(150, 500)


def test_the_trainer_learns_from_the_models_tokens_only(batches):
    for batch in batches:
        for sample, train in zip(samples([batch]), assemble(batch.groups), strict=True):
            num_prompt = len(sample.prompt_tokens)
            shifted = [0] * (num_prompt - 1) + list(sample.loss_mask) + [0]
            assert train.loss_mask.tolist() == shifted
            assert train.tokens.tolist() == [*sample.prompt_tokens, *sample.response_tokens]


def test_the_server_saw_exactly_the_tokens_that_are_trained_on(metrics):
    """Its log-probs, turn after turn, are the trainer's on the whole trajectory at once. Bounds as
    in test_program.py; tokens from a new tokenization would differ by whole units."""
    compared = [line for line in steps(metrics) if "actor/rollout_kl" in line]
    assert len(compared) >= NUM_STEPS / 2
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 for line in compared)
    assert all(abs(line["actor/rollout_kl"]) < 1e-5 for line in compared)


def test_the_stuck_environment_cost_one_trajectory(run, metrics, batches):
    failures = [line["rollout/num_env_failures"] for line in steps(metrics)]
    assert sum(failures) == 1
    pid = int((run.path.parent / "stuck").read_text())
    assert not os.path.exists(f"/proc/{pid}")  # killed, though it never let go of the CPU
    assert "failed: timeout" in run.log("controller").read_text()
    for sample in samples(batches):
        if sample.reward_error:
            assert sample.reward_error == "environment: timeout"
            assert (sample.reward, sample.correct, sample.is_terminated, sample.num_turns) == (0.0, False, False, 1)
    assert all(len(group.samples) == 8 for batch in batches for group in batch.groups)


def test_sample_responses_show_the_turns(run):
    groups = [json.loads(line) for line in run.rollout(NUM_STEPS).read_text().splitlines()]
    shown = [response for group in groups for response in group["responses"] if response.get("num_turns") == 2]
    assert shown
    for response in shown:
        assert [turn["by"] for turn in response["turns"]] == ["model", "environment", "model"]
        every_token = "".join(turn["text"] for turn in response["turns"])
        # special tokens are sampled now and then
        assert re.sub("<(eos|unk|pad)>", "", every_token) == response["text"]


def test_the_resolved_config_says_how_it_was_played(run):
    keys = load_config(run.config, []).actor_rollout_ref.rollout.multi_turn
    assert keys.enable and keys.environment_kwargs["call_open"] == "("

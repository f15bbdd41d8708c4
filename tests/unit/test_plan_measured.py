"""A plan of time with the measurements of an earlier run."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.__main__ import main
from megatron_dapo.commands.plan import step_time
from megatron_dapo.commands.plan.measured import FIRST_STEPS, MeasuredRun
from megatron_dapo.commands.plan.step_time import Assumptions, Factors, phase_times
from megatron_dapo.commands.plan.training_time import Efficiency
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config, to_yaml
from megatron_dapo.config.recipes import recipe
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.huggingface.spec_reader import model_spec

pytestmark = pytest.mark.unit

SPEC = model_spec(model_json_named("qwen2.5-7b"))
LENGTHS = Lengths.with_mean(2000, 0.7, 20480)
FACTORS = Factors(server=1.5, update=2.0, log_probs=3.0, hand_over=4.0, push=5.0)
PROMPT, KEPT, DROPPED, WAITED = 120, 100, 300, 0.25
RUNNING = 40.0  # requests of each server on average


@pytest.fixture
def run(tmp_path):
    """A run folder of the 7B recipe, on GPUs slower than their estimate by FACTORS. Its first steps
    are slower still."""
    config = load_config(recipe("dapo_7b"), ["actor_rollout_ref.model.path=/models/qwen2.5-7b"])
    parts = phase_times(config, SPEC, Assumptions(HARDWARE["h100"], LENGTHS, PROMPT, KEPT / (KEPT + DROPPED)))
    speed = parts.server
    seconds = 50.0
    token_s = (speed.token_s + RUNNING * speed.token_s_per_request) * FACTORS.server
    record = {
        "prompt_length/mean": PROMPT,
        "response_length/mean": LENGTHS.mean,
        "response_length/mean_square": LENGTHS.mean_square,
        "dapo/num_kept_groups": KEPT,
        "dapo/num_filtered_groups": DROPPED,
        "rollout/seconds": seconds,
        "rollout/slots_used": RUNNING / config.actor_rollout_ref.rollout.max_concurrency,
        "rollout/num_tokens": parts.num_servers * RUNNING / token_s * seconds,
        "rollout/tokens_per_s": 1.0,
        "time/rollout": seconds + WAITED,
        "time/distribute": parts.hand_over * FACTORS.hand_over - WAITED,
        "time/old_log_probs": parts.score * FACTORS.log_probs,
        "time/update": parts.training.update * FACTORS.update,
        "time/weight_sync": parts.push * FACTORS.push,
    }
    record["response_length/max"] = 20480
    first = record | {"time/update": 1000.0}
    rows = [{"step": 0, "val/accuracy": 0.5}, *[first] * FIRST_STEPS, record, record]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 1} | row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def test_a_run_tells_its_lengths_its_acceptance_and_how_much_slower_its_parts_were(run):
    measured = MeasuredRun.of(run)
    assert measured.acceptance() == KEPT / (KEPT + DROPPED)
    assert measured.prompt() == pytest.approx(PROMPT)
    assert measured.lengths(20480).mean_square == pytest.approx(LENGTHS.mean_square, rel=1e-6)
    factors = measured.factors(SPEC, HARDWARE["h100"], Efficiency())
    assert vars(factors) == pytest.approx(vars(FACTORS), rel=1e-5)


def test_lengths_are_cut_at_the_mean_of_the_steps_longest_responses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row, longest in zip(rows[-2:], (5000, 7000), strict=True):
        row["response_length/max"] = longest
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert MeasuredRun.of(run).lengths(20480).longest == 6000
    assert MeasuredRun.of(run).lengths(4000).longest == 4000


def test_each_part_of_another_plan_takes_as_much_longer():
    config = load_config(recipe("dapo_7b"), ["data.train_batch_size=64"])
    assumed = Assumptions(HARDWARE["h100"], LENGTHS, PROMPT, 0.25)
    plain = phase_times(config, SPEC, assumed)
    slower = phase_times(config, SPEC, replace(assumed, factors=FACTORS))
    assert slower.server.tokens_per_s * FACTORS.server == pytest.approx(plain.server.tokens_per_s)
    assert slower.training.update == pytest.approx(plain.training.update * FACTORS.update)
    assert slower.training.mfu == pytest.approx(plain.training.mfu / FACTORS.update)
    assert slower.score == pytest.approx(plain.score * FACTORS.log_probs)
    assert slower.hand_over == pytest.approx(plain.hand_over * FACTORS.hand_over)
    assert slower.push == pytest.approx(plain.push * FACTORS.push)


def test_the_command_takes_missing_options_from_a_run(run, capsys, monkeypatch):
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 200)
    common = [
        "plan",
        "--config",
        recipe("dapo_7b"),
        "--model",
        "qwen2.5-7b",
        "--staleness",
        "0",
        "--measured",
        str(run),
    ]
    assert main([*common, "data.train_batch_size=64"]) == 0
    out = capsys.readouterr().out
    assert "responses of 2000 tokens on average (spread 0.7," in out and "prompts of 120" in out
    assert "25% of the groups carry signal" in out
    assert "server 1.5, update 2, log probs 3, hand over 4, push 5" in out
    assert main([*common, "--acceptance", "0.5", "--mean-length", "1000", "data.train_batch_size=64"]) == 0
    out = capsys.readouterr().out
    assert "responses of 1000 tokens on average (spread 0.9," in out
    assert "50% of the groups carry signal" in out


def test_a_run_that_tells_nothing_is_one_sentence(run, tmp_path):
    with pytest.raises(UserError, match="give a run's folder"):
        MeasuredRun.of(tmp_path / "nonesuch")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[: FIRST_STEPS + 1]))
    with pytest.raises(UserError, match=f"metrics.jsonl has {FIRST_STEPS} steps"):
        MeasuredRun.of(run)
    without = json.loads(lines[-1]) | {"dapo/num_kept_groups": 0}
    (run / "metrics.jsonl").write_text("".join([*lines[:-2], json.dumps(without) + "\n"]))
    with pytest.raises(UserError, match="none of its groups carried signal"):
        MeasuredRun.of(run).acceptance()


@given(st.floats(0.02, 0.8), st.floats(0.05, 2.0), st.integers(100, 30000))
def test_lengths_have_both_moments_that_were_measured(share, sigma, longest):
    made = Lengths.with_mean(share * longest, sigma, longest)
    lengths = Lengths.with_moments(made.mean, made.mean_square, longest)
    assert lengths.mean == pytest.approx(made.mean, rel=1e-6)
    assert lengths.mean_square == pytest.approx(made.mean_square, rel=1e-5)


@pytest.mark.parametrize("mean, square", [(20.0, 400.0), (20.0, 399.0), (100.0, 10000.0)])
def test_lengths_that_are_all_the_same_have_no_spread(mean, square):
    assert Lengths.with_moments(mean, square, 100) == Lengths(mean, 0.0, 100)

"""The committed figures of the hand-over: the memory of a token, and the constant of the plan."""

import json

import pytest

from benchmarks.bench_hand_over import seconds
from benchmarks.hand_over_case import NUM_PROMPT_TOKENS
from megatron_dapo.commands.plan.step_time import HAND_OVER_S
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def committed() -> list[dict]:
    return json.loads((REPOSITORY / "benchmarks" / "results" / "hand_over_cpu.json").read_text())["results"]


def test_the_controller_holds_at_most_20_bytes_per_token_of_any_step():
    for result in committed():
        assert result["bytes_per_token"] <= 20, result["num_samples"]


def test_the_plan_takes_what_a_step_of_the_recipe_was_measured_to_take():
    (whole,) = [result for result in committed() if result["share_of_recipe"] == 1]
    num_tokens = whole["num_samples"] * (whole["num_tokens"] + NUM_PROMPT_TOKENS)
    assert seconds(whole) / num_tokens == pytest.approx(HAND_OVER_S, rel=0.02)

"""What arrays from the client to the micro-batch are for, held over the committed numbers; and how they are read."""

import json

import pytest

from benchmarks.bench_hand_over import BEFORE, NOW, compared, seconds
from benchmarks.hand_over_case import NUM_PROMPT_TOKENS
from megatron_dapo.commands.plan.step_time import HAND_OVER_S
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def committed() -> list[dict]:
    return json.loads((REPOSITORY / "benchmarks" / "results" / "hand_over_cpu.json").read_text())["results"]


def test_the_controller_holds_at_most_20_bytes_per_token_of_any_step():
    for result in committed():
        assert result[NOW]["bytes_per_token"] <= 20, result["num_samples"]


def test_the_ratio_is_of_all_that_lies_between_the_controller_and_the_micro_batches():
    now = {"num_samples": 1024, "num_tokens": 6000, "rounds": 3, "to_rank_0_s": 0.1, "to_ranks_s": 0.3, "cpu_s": 0.5}
    before = now | {"to_rank_0_s": 2.0, "to_ranks_s": 1.2, "cpu_s": 5.0}
    result = compared(now, before)
    assert result["ratio"] == pytest.approx(8.0) and result["cpu_ratio"] == pytest.approx(10.0)
    assert result["share_of_recipe"] == 1 / 8
    assert result[NOW] == now and result[BEFORE] == before
    assert BEFORE not in compared(now, None)


def test_the_plan_takes_what_a_step_of_the_recipe_was_measured_to_take():
    (whole,) = [result[NOW] for result in committed() if result["share_of_recipe"] == 1]
    num_tokens = whole["num_samples"] * (whole["num_tokens"] + NUM_PROMPT_TOKENS)
    assert seconds(whole) / num_tokens == pytest.approx(HAND_OVER_S, rel=0.02)

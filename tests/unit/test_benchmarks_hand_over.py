"""What arrays from the client to the micro-batch are for, held over the committed numbers; and how they are read."""

import json

import pytest

from benchmarks.bench_hand_over import BEFORE, NOW, compared
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def committed() -> list[dict]:
    return json.loads((REPOSITORY / "benchmarks" / "results" / "hand_over_cpu.json").read_text())["results"]


def test_the_controller_holds_at_most_20_bytes_per_token_of_any_step():
    for result in committed():
        assert result[NOW]["bytes_per_token"] <= 20, result["num_samples"]


def test_the_ratio_is_of_all_that_lies_between_the_controller_and_the_micro_batches():
    now = {"num_samples": 1024, "num_tokens": 6000, "rounds": 3, "to_rank_0_s": 0.1, "to_ranks_s": 0.3}
    before = now | {"to_rank_0_s": 2.0, "to_ranks_s": 1.2}
    result = compared(now, before)
    assert result["ratio"] == pytest.approx(8.0) and result["share_of_recipe"] == 1 / 8
    assert result[NOW] == now and result[BEFORE] == before
    assert BEFORE not in compared(now, None)

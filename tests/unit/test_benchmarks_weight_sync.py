"""The purpose of the weight-sync benchmark, held over the committed numbers,
and their arithmetic."""

import json

import pytest
import torch

from benchmarks.bench_weight_sync import Weights, summary
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def test_a_push_in_large_buckets_takes_at_most_a_quarter_longer_than_a_raw_broadcast_that_is_loaded():
    content = json.loads((REPOSITORY / "benchmarks" / "results" / "weight_sync_cpu.json").read_text())
    assert {result["receiver"] for result in content["results"]} == {"a stand-in", "SGLang"}
    for result in content["results"]:
        assert result["num_bytes"] > 100e6
        if result["receiver"] == "a stand-in" and result["num_buckets"] < 10:
            assert result["share_of_raw"]["raw, loaded"] >= 0.8


def test_a_share_is_of_a_raw_broadcast_in_the_same_round():
    """The machine is ten times slower in the second round, and twice in the third."""

    def taken(*totals: float) -> list[dict[str, float]]:
        return [{"total": total, "send": total / 2} for total in totals]

    samples = {"raw, kept": taken(1, 10, 2), "raw, fresh": taken(1.5, 15, 3), "push": taken(2, 20, 4)}
    result = summary("any", 10**6, 5, 3, samples)
    assert result["share_of_raw"] == {"raw, kept": 0.5, "raw, fresh": 0.75}
    assert result["seconds"] == {"raw, kept": 2, "raw, fresh": 3, "push": 4}
    assert result["push_s"] == {"total": 4, "send": 2}


def test_a_source_gives_what_it_lists():
    weights = Weights({"a": torch.zeros(2, 3), "b": torch.ones(4)})
    specs = weights.specs()
    assert [(spec.name, spec.shape) for spec in specs] == [("a", (2, 3)), ("b", (4,))]
    assert [tensor.sum() for tensor in weights.gather(specs)] == [0, 4]

"""Every kind of reward is measured in one run: held over the committed results."""

import json

import pytest

from benchmarks.bench_rewards import Served, cases, responses
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

REPORT = json.loads((REPOSITORY / "benchmarks/results/rewards_cpu.json").read_text())


def test_every_kind_was_measured_and_only_a_judge_that_knows_nothing_gives_no_score():
    rows = {row["reward"]: row for row in REPORT["results"]}
    assert list(rows) == [case.name for case in cases(Served((), ()))]
    for name, row in rows.items():
        assert row["per_s"] == pytest.approx(row["num_responses"] / row["seconds"])
        assert row["num_errors"] == 0 or name.startswith("judge")


def test_all_kinds_score_the_same_responses_which_are_all_different():
    texts = responses(64)
    assert len(set(texts)) == 64 and texts[:16] == responses(16)
    assert sum("print(6)" in text for text in texts) == 16

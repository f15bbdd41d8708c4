"""Answers judged one by one: `math_verify` gives the judgement,
`math_dapo` gives verl's verdict."""

import math_verify as sympy_verify
import pytest

from megatron_dapo.rewards.symbolic import math_verify
from megatron_dapo.rewards.text import math_dapo
from tests.judged_answers import judged_answers
from tests.proofs import amount

pytestmark = pytest.mark.unit

ROWS = judged_answers()
PADDED = {"033", "34.0"}  # truths that verl compares as they are written


def test_the_table_has_right_and_wrong_answers_to_every_kind():
    assert len(ROWS) >= 1000
    for kind in {row.kind for row in ROWS}:
        assert {row.right for row in ROWS if row.kind == kind} == {True, False}, kind


@pytest.mark.parametrize("kind", sorted({row.kind for row in ROWS}))
def test_math_verify_gives_the_judgement(kind):
    rows = [row for row in ROWS if row.kind == kind]
    mistaken = [
        (row.truth, row.answer)
        for row in rows
        if math_verify("", row.response, row.truth, {}, time_limit_s=60)["correct"] != row.right
    ]
    assert not mistaken


def test_the_table_agrees_with_the_pinned_math_verify():
    """In `make test` for every tenth row: the package and the table rarely change."""
    rows = ROWS[:: amount(10, 1)]

    def verdict(row):
        parsed = [sympy_verify.parse(text, parsing_timeout=None) for text in (f"\\boxed{{{row.truth}}}", row.response)]
        return sympy_verify.verify(*parsed, timeout_seconds=None)

    assert not [(row.truth, row.answer) for row in rows if verdict(row) != row.others["math_verify"]]


def test_math_dapo_gives_the_verdict_of_verl_on_answer_lines():
    rows = [row for row in ROWS if "answer" in row.line.lower() and row.truth not in PADDED]
    differing = [
        (row.truth, row.line)
        for row in rows
        if math_dapo("", row.line, row.truth, {})["correct"] != row.others["verl_dapo"]
    ]
    assert not differing

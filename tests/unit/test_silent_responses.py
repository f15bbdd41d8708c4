"""No built-in reward calls a response right that answers nothing, at any ground truth.

Rewards with a package or a sandbox: test_reasoning_gym.py, test_code_tests.py.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dapo.config.built_ins import BUILT_IN_REWARDS
from megatron_dapo.rewards.reward_registry import score_response, wrong_score
from megatron_dapo.rewards.text import math_dapo
from tests.proofs import amount
from tests.silence import SILENCE, TRUTHS

pytestmark = pytest.mark.unit

VERL = Path(__file__).parent / "data" / "verl_math_dapo.tsv"
"""Verdicts of verl/utils/reward_score/math_dapo.py, of verl v0.7.0 (commit 00a10a8e of that file)
and of verl 0.9.1."""
PADDED = ("033", "34.0")  # verl compares them as they are written
CALLS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BUILT_IN_REWARDS.keys() - {"reasoning_gym", "code_tests"}),
    ("math_dapo", {"boxed_fallback": True}),
    ("exact_match", {"marker": "####"}),
    ("exact_match", {"ignore_case": True}),
    ("exact_match", {"strip": False}),
]


@settings(max_examples=amount(200, 100_000))
@given(st.one_of(*TRUTHS.values()), SILENCE)
@example("\\frac{1}{2}", "I have no idea.")
@example("0.5", "")
@example("square", "Answer: \\text{}")
@example("a ,", "Answer: ,")
@example("\\emptyset", "Answer: {}")
@example("\\{\\}", "$$\n{}\n$$")
def test_silence_is_never_right(truth, response):
    num_judged = 0
    for function, kwargs in CALLS:
        if function == "exact_match" and response.strip().casefold() == truth.strip().casefold():
            continue
        try:
            result = score_response(function, kwargs, "math_dapo", response, truth, {})
        # a truth outside mathematics; the pool gives the score of a wrong answer
        except (ValueError, TimeoutError):
            continue
        num_judged += 1
        assert (result.score, result.correct) == (wrong_score(function, "math_dapo"), False), (function, kwargs)
    assert num_judged  # text is judged whatever the truth is


def test_math_dapo_gives_the_verdict_of_verl_with_and_without_an_answer_line():
    with VERL.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    judged = [(json.loads(row["truth"]), json.loads(row["response"]), row["verl_0.7.0"] == "1") for row in rows]
    assert {right for _, response, right in judged if "answer" in response.lower()} == {True, False}
    assert sum("answer" not in response.lower() for _, response, _ in judged) > 100
    differing = [
        (truth, response)
        for truth, response, right in judged
        if truth not in PADDED and math_dapo("", response, truth, {})["correct"] != right
    ]
    assert not differing


def test_verl_0_9_1_differs_from_the_rule_of_the_recipe_in_boxed_answers_alone():
    """It reads them in the absence of an answer line; `boxed_fallback` does."""
    with VERL.open(encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        differing = [row["response"] for row in rows if row["verl_0.7.0"] != row["verl_0.9.1"]]
    assert differing and all("boxed" in response for response in differing)

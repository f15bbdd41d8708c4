"""Verifiers: right answers, wrong answers, and that no text makes them raise or hang."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import BUILT_IN_REWARDS
from megatron_dapo.rewards.answers import final_answer, last_answer_line, last_boxed, normalize
from megatron_dapo.rewards.reward_registry import (
    DATA_SOURCES,
    check_estimator,
    check_reward,
    function_name,
    score_response,
    wrong_score,
)
from megatron_dapo.rewards.symbolic import is_too_expensive, math_verify
from megatron_dapo.rewards.text import exact_match, math_dapo
from tests.fake_rollout import REWARD, run_in_folder

pytestmark = pytest.mark.unit


def boxed(answer):
    return f"so \\boxed{{{answer}}}"


SET_2000 = "\\{" + ",".join(map(str, range(2000))) + "\\}"
SET_2000_REVERSED = "\\{" + ",".join(map(str, reversed(range(2000)))) + "\\}"

MATH_DAPO = [
    ("It is clear.\nAnswer: 34", "34", True),
    ("Answer: 35", "34", False),
    ("Answer: 34\nwait\nanswer : 35", "35", True),  # the last one counts, in any case
    ("Answer: 35\nAnswer: 34", "35", False),
    ("Answer: $34$.", "34", True),
    ("Answer:\n34", "34", True),
    ("Answer: x = 34", "34", True),
    ("Answer: 1,234", "1234", True),
    ("Answer: 12 dollars", "12", True),
    ("Answer: 30^\\circ", "30", True),
    ("Answer: 5 \\text{ cm}", "5", True),
    ("Answer: \\frac12", "\\frac{1}{2}", True),
    ("Answer: \\sqrt3", "\\sqrt{3}", True),
    ("Answer: \\boxed{7}", "7", True),
    ("Answer: \\text{Tuesday}", "Tuesday", True),
    ("Answer: (1, 2)", "(1,2)", True),
    ("Answer: 1/2", "\\frac{1}{2}", False),  # a string rule, not mathematics
    ("Answer: 0.50", "0.5", False),
    ("\\boxed{34}", "34", False),  # no Answer line
    ("The answer is 34", "34", False),
    ("Answer: 34" + " " * 300, "34", False),  # outside the last 300 characters
    ("Answer: 34" + "." * 289, "34", False),
    ("", "34", False),
    ("Answer:", "34", False),
]

MATH_VERIFY = [
    (boxed("\\frac{1}{2}"), "0.5", True),
    (boxed("1/2"), "\\frac{2}{4}", True),
    (boxed("1/3"), "1/4", False),
    (boxed("50\\%"), "0.5", True),
    (boxed("50\\%"), "50", True),
    (boxed("0.333333"), "\\frac{1}{3}", True),
    (boxed("\\{1,2,3\\}"), "\\{3,2,1\\}", True),
    (boxed("\\{1,2,3\\}"), "\\{1,2\\}", False),
    (boxed("x^2+2x+1"), "(x+1)^2", True),
    (boxed("x^2+2x+2"), "(x+1)^2", False),
    (boxed("[0,1)"), "[0,1)", True),
    (boxed("[0,1)"), "[0,1]", False),
    (boxed("3 \\text{ cm}"), "3", True),
    (boxed("10^{9}"), "1000000000", True),
    ("Answer: 1,234", "1234", True),
    ("Answer: \\frac{\\sqrt{2}}{2}", "1/\\sqrt{2}", True),
    ("Answer: 5\nNo: \\boxed{6}", "6", True),
    ("\\boxed{6}\nAnswer: 5", "6", False),
    ("the answer is 42", "42", True),
    ("so we get $x=5$", "5", True),
    ("I do not know", "5", False),
    ("", "5", False),
    (boxed(""), "5", False),
    (boxed("\\frac{1}{0}"), "5", False),
]

# data source, and the scores of its reward in verl 0.9 for a right and a wrong answer
VERL_SOURCES = [
    *((source, 1.0, -1.0) for source in ("math", "math_dapo", "math_dapo_reasoning", "aime2024", "aime_2025")),
    *((source, 1.0, 0.0) for source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval")),
    *((source, 1.0, 0.0) for source in ("HuggingFaceH4/MATH-500", "openai/gsm8k")),
    *((f"numina_{name}", 1.0, 0.0) for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc")),
    *((f"numina_{name}", 1.0, 0.0) for name in ("cn_k12", "olympiads")),
]

HOSTILE = [
    (boxed("9^9^9"), "1", False),
    (boxed("9^{9^{9}}"), "1", False),
    (boxed("10^{10^{10}}"), "10^{10^{10}}", True),  # the same string is the same number
    (boxed("100000000!"), "1", False),
    (boxed("((9!)!)!"), "1", False),
    (boxed("3^{100000000}+1"), "1", False),
    ("$7^{7^{7^7}} \\mod 10$", "3", False),
    ("\\boxed{" * 5000, "1", False),
    ("\\boxed{" * 5000 + "1", "1", False),
    (boxed("{" * 3000 + "1" + "}" * 3000), "1", False),
    (boxed("(" * 2000 + "1" + ")" * 2000), "1", False),
    (boxed("\\frac{1}{" * 200 + "2" + "}" * 200), "1", False),
    (boxed(SET_2000), SET_2000, True),
    (boxed(SET_2000_REVERSED), SET_2000, False),  # not worth sympy's time
    ("\0\0 \\boxed{5} \0", "5", True),
    ("\ud800 \\boxed{5}", "5", True),
    (" " * 100_000, "5", False),
    ("$1$ " * 20_000, "1", True),
    (boxed("5") * 5000, "5", True),
    (boxed("7" * 100_000), "5", False),
    ("7" * 1_000_000, "5", False),
    ("Answer:" * 50_000, "5", False),
    ("__import__('os').abort()", "5", False),
]


@pytest.mark.parametrize(("response", "truth", "correct"), MATH_DAPO)
def test_math_dapo_follows_the_minerva_rule(response, truth, correct):
    verdict = math_dapo("math_dapo", response, truth, {})
    assert (verdict["score"], verdict["correct"]) == (1.0 if correct else -1.0, correct)


def test_math_dapo_reads_boxed_answers_only_on_request_and_without_an_answer_line():
    assert math_dapo("", boxed("34"), "34", {}, boxed_fallback=True)["correct"]
    assert not math_dapo("", boxed("34") + "\nAnswer: 35", "34", {}, boxed_fallback=True)["correct"]


@pytest.mark.parametrize(("response", "truth", "correct"), MATH_VERIFY)
def test_math_verify_compares_mathematics(response, truth, correct):
    verdict = math_verify("", response, truth, {}, time_limit_s=60)
    assert (verdict["score"], verdict["correct"]) == (float(correct), correct)


@pytest.mark.parametrize(("response", "truth", "correct"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_get_their_verdict_at_once(response, truth, correct):
    for verifier, right in ((math_verify, correct), (math_dapo, None), (exact_match, None)):
        verdict = verifier("", response, truth, {})  # TimeoutError for endless work
        assert right is None or verdict["correct"] == right


def test_what_the_caps_let_through_ends_at_the_time_limit():
    hard = boxed("\\binom{10^9}{5\\cdot 10^8}")
    assert not is_too_expensive(hard)
    with pytest.raises(TimeoutError, match=r"no verdict within 0\.2 s"):
        math_verify("", hard, "1", {}, time_limit_s=0.2)


def test_math_verify_works_outside_the_main_thread():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math_verify("", boxed("x+x"), "2x", {})["correct"]))
    thread.start()
    thread.join()
    assert verdicts == [True]


@pytest.mark.parametrize(
    ("kwargs", "response", "correct"),
    [
        ({}, " 82\n", True),
        ({"strip": False}, " 82\n", False),
        ({"marker": ":"}, "4+8+0=12,2+5+1=8:82", True),
        ({"marker": ":"}, "a:82:83", False),
        ({"marker": ":"}, "82", False),  # no marker, no answer
        ({"marker": "####"}, "because\n#### 82", True),
    ],
)
def test_exact_match_compares_the_named_part(kwargs, response, correct):
    verdict = exact_match("", response, "82", {}, **kwargs)
    assert (verdict["score"], verdict["correct"]) == (float(correct), correct)


@pytest.mark.parametrize(
    ("function", "response", "answer"),
    [
        ("math_dapo", "so it is\nAnswer: $034$ ", "034"),
        ("math_dapo", "it is 34", None),
        ("math_verify", "so " + boxed("0.50"), "1/2"),
        ("math_verify", "Answer: 1/2", "1/2"),
        ("math_verify", "Answer: $1{,}000$", "1000"),
        ("math_verify", "Answer: \\text{Monday}", "monday"),
        ("math_verify", boxed("x+ 1"), "x+1"),
        ("exact_match", " 82\n", "82"),
        ("tests.unit.test_rewards:own", "it is 34\nAnswer: 35 ", "35"),
        ("tests.unit.test_rewards:own", " it is 34", "it is 34"),
        ("tests.unit.test_rewards:own", "7" * 500, "7" * 200),
        ("tests.unit.test_rewards:own", " ", None),
        ("tests.unit.test_rewards:with_answer", "anything", "5"),
    ],
)
def test_what_a_response_answers_comes_with_its_verdict(function, response, answer):
    """For the vote: in a form in which equal answers are equal; of one's own function as it says,
    or as we read it."""
    assert score_response(function, {}, "", response, "1", {}).answer == answer


def own(data_source, response, ground_truth, extra_info):
    return 1.0


def with_answer(data_source, response, ground_truth, extra_info):
    return {"score": 1.0, "pred": 5}


def test_exact_match_may_ignore_case():
    assert exact_match("", "YES", "yes", {}, ignore_case=True)["correct"]
    assert not exact_match("", "YES", "yes", {})["correct"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200), st.text(max_size=30))
def test_text_verifiers_never_raise(response, truth):
    for text in (response, f"Answer: {response}", boxed(response)):
        math_dapo("", text, truth, {}, boxed_fallback=True)
        exact_match("", text, truth, {}, marker=":")
        final_answer(text)


_MATH_PIECES = ["1", "2", "x", "+", "-", "/", "^", "{", "}", "(", ")", ",", "\\frac", "\\sqrt", "$", "%", "!", "="]
_MATH_TEXT = st.lists(st.sampled_from(_MATH_PIECES), max_size=12).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.one_of(_MATH_TEXT, st.text(max_size=40)))
def test_math_verify_never_raises_anything_but_its_time_limit(response):
    for text in (response, f"Answer: {response}", boxed(response)):
        try:
            math_verify("", text, "\\frac{3}{7}", {}, time_limit_s=0.3)
        except TimeoutError:
            continue


@given(st.text(max_size=60))
def test_an_answer_equals_itself_and_its_dressed_forms(answer):
    line = " ".join(answer.split()).replace("=", "")
    if normalize(line) and "answer" not in line.lower():
        assert math_dapo("", f"Answer: {line}", line, {})["correct"]


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**30), st.integers(1, 10**6))
def test_equal_fractions_are_equal_without_sympy(numerator, denominator, factor):
    same = f"{numerator * factor}/{denominator * factor}"
    assert math_verify("", boxed(same), f"{numerator}/{denominator}", {})["correct"]
    assert not math_verify("", boxed(same), f"{numerator + 1}/{denominator}", {})["correct"]


def test_the_last_boxed_content_is_found_with_any_braces():
    assert last_boxed("\\boxed{a} \\boxed{b{c}{d}}") == "b{c}{d}"
    assert last_boxed("\\boxed{a} \\boxed{b") == "a"
    assert last_boxed("\\boxed{\\boxed{3}}") == "3"
    assert last_boxed("\\fbox{3} \\boxed 3") == "3"
    assert last_boxed("\\fboxed{3} \\boxed 3") is None
    assert last_answer_line("no") is None


def test_each_data_source_has_its_verifier_and_unknown_ones_are_refused():
    assert function_name("by_data_source", "math_dapo") == "math_dapo"
    assert function_name("by_data_source", "aime2024") == "math_dapo"
    assert function_name("by_data_source", "openai/gsm8k") == "math_verify"
    for source, right, wrong in VERL_SOURCES:
        scores = [score_response("by_data_source", {}, source, f"Answer: {n}", "7", {}).score for n in (7, 8)]
        assert scores == [right, wrong], source
    assert set(DATA_SOURCES.values()) <= set(BUILT_IN_REWARDS)
    with pytest.raises(UserError, match="'poetry'"):
        check_reward("by_data_source", {}, ["math_dapo", "poetry"])
    with pytest.raises(UserError, match="'exact_match'"):
        check_reward("exactmatch", {})


def test_the_score_of_a_wrong_answer_is_the_functions():
    # test_reasoning_gym.py: it needs its package; test_code_tests.py: a sandbox
    for name in BUILT_IN_REWARDS.keys() - {"reasoning_gym", "code_tests"}:
        wrong = score_response(name, {}, "math_dapo", boxed("1"), "2", {})
        assert wrong.score == wrong_score(name, "math_dapo")
    assert wrong_score("by_data_source", "math_dapo") == -1.0
    assert wrong_score("by_data_source", "openai/gsm8k") == 0.0


@pytest.mark.parametrize("function", ["math_dapo", "by_data_source"])
def test_a_mean_of_rewards_divides_only_if_wrong_answers_give_0(function):
    with pytest.raises(UserError, match=f"{function}.*'aime2024' -1, but.*maxrl.*such as math_verify"):
        check_estimator("maxrl", function, ["aime2024", "openai/gsm8k"])
    check_estimator("grpo", function, ["aime2024"])
    check_estimator("maxrl", "math_verify", ["aime2024"])
    check_estimator("maxrl", "by_data_source", ["openai/gsm8k"])


def test_a_function_of_ones_own_says_itself_what_a_wrong_answer_scores(folder):
    check_estimator("maxrl", "my.module:function", ["any"], custom=0.0)
    (folder / "fake_rewards.py").write_text(REWARD + "score.wrong_score = -1.0\n")
    with pytest.raises(UserError, match="is fake_rewards:score, which scores wrong answers -1, but.*is maxrl"):
        run_in_folder(folder, None, overrides=["algorithm.adv_estimator=maxrl"])


def test_the_time_limit_of_sympy_does_not_count_the_time_of_other_processes(monkeypatch):
    """Sleep stands for a process with its cores taken by others."""

    def wait(*args, **kwargs):
        time.sleep(1.5)
        return True

    monkeypatch.setattr("megatron_dapo.rewards.symbolic.sympy_verify.verify", wait)
    assert math_verify("", boxed("x+x"), "2x", {}, time_limit_s=1.0)["correct"]


@pytest.mark.parametrize("work", [lambda: time.sleep(0.01), lambda: None], ids=["sleeps", "computes"])
def test_the_time_limit_ends_sleep_and_computation(monkeypatch, work):
    def go_on(*args, **kwargs):
        while True:
            work()

    monkeypatch.setattr("megatron_dapo.rewards.symbolic.sympy_verify.verify", go_on)
    with pytest.raises(TimeoutError):
        math_verify("", boxed("x+x"), "2x", {}, time_limit_s=0.2)


def test_the_time_limit_holds_even_if_its_first_alarm_is_lost(monkeypatch):
    """Python drops exceptions of a destructor or a gc callback;
    the next alarm comes a second later."""
    lost = []

    def swallow_the_first_alarm(*args, **kwargs):
        try:
            while not lost:
                time.sleep(0.01)
        except BaseException as alarm:
            lost.append(alarm)
        while True:
            time.sleep(0.01)

    monkeypatch.setattr("megatron_dapo.rewards.symbolic.sympy_verify.verify", swallow_the_first_alarm)
    with pytest.raises(TimeoutError):
        math_verify("", boxed("x+x"), "2x", {}, time_limit_s=0.2)
    assert lost

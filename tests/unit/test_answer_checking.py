r"""Answer checking by `math_verify` and `math_dapo`: pairs, and laws for all numbers and tuples."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.rewards.exact import exact_number
from megatron_dapo.rewards.reward_registry import score_response
from megatron_dapo.rewards.symbolic import math_verify
from megatron_dapo.rewards.text import math_dapo

pytestmark = pytest.mark.unit

# (ground truth, answers that are right, answers that are wrong): each is boxed
BOXED = [
    ("2", ["2", "x=2", "$2$", "\\[2\\]", "2.0", "02", "+2"], ["x=1,x=2", "x=2,x=1", "1,2", "2,2,1", "1 or 2", "2+2=4"]),
    ("3", ["3", "\\frac{6}{2}", "1+2", "\\text{3}"], ["$3$ and $4$", "$4$ and $3$", "3 \\text{ or } 4", "1 2", "-3"]),
    ("10", ["10", "5\\cdot 2"], ["1, 2, \\ldots, 10", "10, 11, \\dots", "8,9,10, ...", "1,2,\u2026,10"]),
    ("1,2,\\ldots,10", ["1,2,\\ldots,10", "1, 2, \\ldots, 10"], ["10"]),
    ("1,2", ["1,2", "2,1", "1, 2", "$1$ and $2$", "x=1,x=2"], ["12", "1.2", "1", "2", "1,2,3", "1,3"]),
    ("12", ["12", "12.0", "\\frac{24}{2}"], ["1,2", "1, 2", "1 2", "\\{1,2\\}", "21", "112", "12!"]),
    ("1234", ["1,234", "1{,}234", "1\\,234", "1 234", "1234"], ["1, 234", "1.234", "12,34", "1,2,3,4", "234"]),
    ("1, 234", ["1, 234", "234, 1"], ["1234", "1,235", "235"]),
    ("\\frac{11}{2}", ["5.5", "11/2", "5\\frac{1}{2}"], ["1 1/2", "1\\ 1/2", "11", "2/11", "-\\frac{11}{2}"]),
    ("\\frac{1}{3}", ["1/3", "0.333333", "0.3333333333"], ["0.33", "0.3333", "0.333334", "3"]),
    ("0.0000001", ["0.0000001", "10^{-7}", "1e-7", "1/10000000"], ["0.0000002", "2\\cdot 10^{-7}", "0", "2/10000000"]),
    ("0.5", ["\\frac12", ".5", "50\\%", "1/2"], ["0.5000001", "5", "0.05", "2"]),
    ("033", ["33", "033", "33.0"], ["330", "3", "034", "0.33"]),
    ("34.0", ["34", "34.0", "34.00", "034"], ["340", "34.1", "3.40", "35"]),
    ("-7", ["-7", "\u22127", "-\\frac{14}{2}", "- 7"], ["7", "--7", "-\\frac{7}{2}", "-7.5"]),
    ("1000000000000000000000000", ["10^{24}"], ["1000000000000000000000001", "10^{24}+1"]),
    ("(1,2)", ["(1,2)", "(1, 2)", "\\left(1,2\\right)"], ["(2,1)", "[1,2]", "(1,2,3)", "12"]),
    ("(3,1,2)", ["(3,1,2)", "(3, 1, 2)"], ["(1,2,3)", "(3,1)", "\\{1,2,3\\}"]),
    ("x^2-1", ["x^2-1", "(x-1)(x+1)", "-1+x^2"], ["x^2+1", "x-1", "1-x^2", "2"]),
    ("1+i", ["1+i", "i+1"], ["1-i", "i", "1", "1+2i"]),
    ("x=5", ["5", "x=5"], ["y=5", "x=6"]),
    ("x>5", ["x>5"], ["x \\ge 5", "x<5", "5"]),
    ("listen", ["listen", "\\text{listen}", "Listen"], ["silent", "\\text{silent}", "tinsel"]),
    ("\\text{no}", ["no", "\\text{No}"], ["on", "\\text{yes}"]),
    ("18", ["18 dollars", "\\$18", "18 \\text{ dollars}", "18 cm", "x = 18 dollars"], ["18 or 19 dollars", "1 dollar"]),
    ("5 dollars", ["5", "5 dollars", "\\$5.00"], ["50", "6 dollars"]),
    ("\\overline{AB}", ["AB", "\\overline{AB}"], ["AC"]),
    ("0.\\overline{3}", ["0.\\overline{3}"], ["0.3"]),
    ("\\text{June 5}", ["June 5", "\\text{June 5}"], ["June 6", "July 5"]),
    ("\\text{(B)}", ["B", "(B)", "\\text{(B)}"], ["C", "A", "\\text{(A)}"]),
]

# (answer line, ground truth, right)
LINES = [
    ("2^{10}", "1024", True),
    ("2^{10}", "2", False),
    ("x^2-1", "x^2-1", True),
    ("x^2-1", "x^2+1", False),
    ("x^2-1", "2", False),
    ("1+i", "1+i", True),
    ("1+i", "1", False),
    ("10^{-3}", "0.001", True),
    ("10^{-3}", "10", False),
    ("5!", "120", True),
    ("5!", "5", False),
    ("\\[5\\]", "5", True),
    ("\\[5\\]", "6", False),
    ("\\[\n5\n\\]", "5", True),
    ("\n$$\n5\n$$\nas wanted", "5", True),
    ("\\[\n5\n\\] or \\[6\\]", "5", False),
    ("\\[\n5", "5", False),
    ("\\(5\\)", "5", True),
    ("$5$.", "5", True),
    ("**5**", "5", True),
    ("5.", "5", True),
    ("5 cm", "5", True),
    ("5 \\text{ cm}", "5", True),
    ("the total is 5 apples", "5", True),
    ("5 or 6", "5", False),
    ("$5$ or $6$", "5", False),
    ("x = 5, y = 6", "6", False),
    ("\\sin(1)", "\\sin 1", True),
    ("\\pi/2", "\\frac{\\pi}{2}", True),
    ("\\fbox{5}", "5", True),
    ("\\fboxed{5}", "5", False),
]

INTEGERS = st.integers(-(10**12), 10**12)
CHECKS = settings(max_examples=40, deadline=None)


def is_right(answer, truth):
    return math_verify("", answer, truth, {}, time_limit_s=60)["correct"]


def boxed(answer):
    return f"so it is \\boxed{{{answer}}}"


@pytest.mark.parametrize(("truth", "right", "wrong"), BOXED, ids=[row[0] for row in BOXED])
def test_boxed_answers_are_compared_as_mathematics(truth, right, wrong):
    verdicts = {answer: is_right(boxed(answer), truth) for answer in [*right, *wrong]}
    assert verdicts == dict.fromkeys(right, True) | dict.fromkeys(wrong, False)


@pytest.mark.parametrize(("line", "truth", "right"), LINES)
def test_answer_lines_are_read_as_mathematics(line, truth, right):
    assert is_right(f"Thus.\nAnswer: {line}", truth) == right


@CHECKS
@given(INTEGERS, INTEGERS)
def test_an_integer_equals_its_other_forms_and_no_other_integer(number, other):
    forms = [
        f"{number}",
        f"{number:,}",
        f"{number}.0",
        f"\\frac{{{number * 2}}}{{2}}",
        f"{number * 3}/3",
        f"x={number}",
    ]
    for form in forms:
        assert is_right(boxed(form), str(number)), form
        assert is_right(f"Answer: {form}", f"{number}.0"), form
        if other != number:
            assert not is_right(boxed(form), str(other)), form


@CHECKS
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6), st.integers(1, 99), INTEGERS)
def test_a_fraction_equals_its_multiples_and_no_neighbour(numerator, denominator, factor, step):
    truth = f"\\frac{{{numerator}}}{{{denominator}}}"
    assert is_right(boxed(f"\\frac{{{numerator * factor}}}{{{denominator * factor}}}"), truth)
    assert is_right(boxed(f"{numerator * factor}/{denominator * factor}"), truth)
    if step:
        assert not is_right(boxed(f"{numerator * factor + step}/{denominator * factor}"), truth)


@CHECKS
@given(st.decimals(-(10**6), 10**6, allow_nan=False, places=8), st.decimals(-1, 1, allow_nan=False, places=8))
def test_a_decimal_equals_itself_with_zeros_and_no_other_decimal(number, step):
    truth = f"{number:f}"
    assert is_right(boxed(f"{truth}00"), truth)
    if step:
        assert not is_right(boxed(f"{number + step:f}"), truth)


@settings(max_examples=10, deadline=None)  # most of them take sympy a while
@given(st.lists(st.integers(-99, 10**6), min_size=2, max_size=3), st.data())
def test_a_tuple_equals_itself_and_no_other_order_length_or_element(elements, data):
    def written(numbers, separator=", "):
        return f"({separator.join(map(str, numbers))})"

    truth = written(elements)
    assert is_right(boxed(written(elements, ",")), truth)
    position = data.draw(st.integers(0, len(elements) - 1))
    changed = [*elements[:position], elements[position] + data.draw(st.integers(1, 9)), *elements[position + 1 :]]
    shuffled = data.draw(st.permutations(elements))
    for other in (changed, elements[:-1], [*elements, 1], shuffled):
        if other != elements:
            assert not is_right(boxed(written(other)), truth), other
    joined = "".join(str(abs(number)) for number in elements)
    assert not is_right(boxed(joined), truth)


@given(st.text(alphabet="0123456789.,/-+eE {}\\$", max_size=20))
def test_reading_a_number_never_raises(text):
    assert isinstance(exact_number(text), Fraction | None)


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("033", ["33", "033"], ["34", "3", "330"]),
        ("34.0", ["34", "34.0"], ["340", "3", "34.5"]),
        ("33", ["33"], ["34"]),
    ],
)
def test_math_dapo_reads_an_integer_truth_that_a_table_padded(truth, right, wrong):
    assert all(math_dapo("", f"Answer: {answer}", truth, {})["correct"] for answer in right)
    assert not any(math_dapo("", f"Answer: {answer}", truth, {})["correct"] for answer in wrong)


def with_acc(data_source, response, ground_truth, extra_info, **verdict):
    return {"score": float(response), **extra_info}


@pytest.mark.parametrize(
    ("score", "verdict", "correct"),
    [
        ("1", {"acc": False}, False),
        ("-1", {"acc": True}, True),
        ("0.2", {"acc": 0.0, "pred": "7"}, False),
        ("-1", {"acc": 1}, True),
        ("0.2", {}, True),
        ("-1", {"acc": 0.0, "correct": True}, True),
    ],
)
def test_acc_of_a_verdict_decides_correctness_as_in_verl(score, verdict, correct):
    result = score_response(f"{__name__}:with_acc", {}, "", score, "", verdict)
    assert (result.score, result.correct) == (float(score), correct)


@pytest.mark.parametrize("accuracy", [None, float("nan"), "high"])
def test_an_acc_that_is_no_number_is_no_verdict(accuracy):
    with pytest.raises(ValueError):
        score_response(f"{__name__}:with_acc", {}, "", "1", "", {"acc": accuracy})


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("13", "13_{10}", True),
        ("14", "13_{10}", False),
        ("12", "1100_2", False),
        (r"\lim_{x\to 0} \frac{\sin x}{x} = 1", "1", True),
        (r"\lim_{x\to 0} \frac{\sin x}{x} = 2", "1", False),
        (r"12 \to 13", "12", False),
    ],
)
def test_a_base_of_ten_and_the_variable_of_a_limit_change_no_answer(answer, truth, right):
    assert math_verify("", f"\\boxed{{{answer}}}", truth, {}, time_limit_s=60)["correct"] == right

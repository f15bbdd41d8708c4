"""Draws of property tests: ground truths of all kinds, and responses that answer nothing."""

import re

from hypothesis import strategies as st

_INTEGERS = st.integers(-(10**6), 10**6)
_DIGITS = st.text("0123456789", min_size=1, max_size=4)
_WORDS = st.sampled_from(
    (
        *("Monday", "June 5", "listen", "yes", "no", "square", "Paris", "New York", "even", "points", "None", "True"),
        *("NaN", "units", "degrees", "hours", "an integer"),
    )
)
_EXPRESSIONS = st.sampled_from(
    (
        *(r"x^2-1", r"\pi", r"2\sqrt{3}", r"\frac{n(n+1)}{2}", r"e^{x}", r"\ln 2", r"1+i", r"x=5", r"y=2x+1", r"x>5"),
        *(r"1<x<3", r"a", r"i", r"\binom{n}{2}", r"[0,1)", r"(1,2)", r"x", r"(-\infty,3]", r"\mathbb{R}", r"5^\circ"),
        *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\$12", r"50\%", r"0.\overline{3}", r"1010_2", r"12 \text{ cm}"),
    )
)
_SETS = st.lists(_INTEGERS, max_size=4).map(lambda members: "\\{" + ",".join(map(str, members)) + "\\}")
TRUTHS = {
    "integer": _INTEGERS.map(str),
    "padded": st.builds("{}{}".format, st.sampled_from(("0", "00", "-0")), _DIGITS),
    "decimal": st.builds("{}.{}".format, _INTEGERS, _DIGITS),
    "fraction": st.builds(r"\frac{{{}}}{{{}}}".format, _INTEGERS, st.integers(1, 999)),
    "slash": st.builds("{}/{}".format, _INTEGERS, st.integers(1, 999)),
    "expression": _EXPRESSIONS,
    "letter": st.sampled_from([*"ABCDE", "(B)", r"\text{(C)}", "AC"]),
    "set": st.one_of(_SETS, st.just(r"\emptyset"), st.just(r"\pm 3")),
    "words": _WORDS,
    "text": st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
        # markup answers a truth of nothing but marks
        lambda text: any(map(str.isalnum, re.sub(r"\\[A-Za-z]+", "", text)))
    ),
}

_PROSE = (
    "I have no idea.",
    "I do not know the answer",
    "Let us think about it step by step.",
    "The answer is not known. We need more time, so let us look at the problem again and",
    "First, we note that this holds for all cases. Therefore the claim follows, and we are done.",
    "This cannot be decided! Sorry.",
)
_PROMPTS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nHow far does the train go?\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "How many of them are there? Put your final answer within \\boxed{}.",
    "<|im_start|>user\nWhat is the largest of these?<|im_end|>\n<|im_start|>assistant\n",
    "Give the final answer, and nothing else, between <answer> and </answer>.",
)
_MARKUP = (
    *(
        "\\boxed{}",
        "\\fbox{}",
        "\\boxed{ }",
        "\\boxed{\\text{}}",
        "\\boxed{$$}",
        "\\boxed",
        "\\boxed{",
        "\\boxed{\\boxed{}}",
    ),
    *(
        "Answer:",
        "Answer: ",
        "Answer:\n",
        "Answer: $$",
        "Answer: **",
        "**Answer:**",
        "Answer: \\text{}",
        "Answer: \\boxed{}",
    ),
    *(
        "\\boxed{\\boxed{}}",
        "Answer: \\boxed{}",
        "Answer: \\(\\)",
        "Answer: \\[\\]",
        "Answer: .",
        'Answer: ""',
        "Answer: \\;",
        "Answer: =",
        "Answer: ,",
        "Answer: {}",
        "Answer:\n{}",
        "\\boxed{{}}",
        "\\boxed{{ }{}}",
    ),
    *("$$", "$ $", "\\[\\]", "\\(\\)", "**", "#", "####", "```", "```python\n```", "---", "<think>", "<think></think>"),
    *("<answer></answer>", "<answer>", "</s>", "<|endoftext|>", "{}", "()", "\\frac{}{}", "\\text{}", "&nbsp;"),
)
_BLANK = st.text(" \t\n\r", max_size=5)


@st.composite
def _truncated(draw):
    """Return the beginning of a text, cut before its answer."""
    text = draw(st.sampled_from([*_PROSE, *_PROMPTS]))
    return text[: draw(st.integers(0, len(text)))] + draw(
        st.sampled_from(("", "\nAnswer:", " \\boxed{", "\n\\boxed", "<think>"))
    )


SILENCE = st.one_of(
    _BLANK,
    _truncated(),
    st.lists(st.sampled_from(_PROSE), min_size=1, max_size=3).map(" ".join),
    st.sampled_from(_PROMPTS),
    st.builds("{}{}{}".format, _BLANK, st.sampled_from(_MARKUP), _BLANK),
    st.lists(st.sampled_from([*_PROSE, *_MARKUP]), min_size=1, max_size=4).map("\n".join),
)

r"""LaTeX that math-verify reads as something else, written so that it reads what is meant."""

import re

_REWRITTEN = (
    ("\u00b0", "^\\circ"),
    ("\\varnothing", "\\emptyset"),
    ("\\log_e", "\\ln"),
    ("\\log_{e}", "\\ln"),
)
# math-verify drops the degree sign
_OF_DEGREES = re.compile(r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d{1,6})\s*\^\{?\\circ\}?\s*[)}]?")
_FALLING_CHAIN = re.compile(r"([^<>=]+?)(>|\\geq?(?![A-Za-z]))([^<>=]+?)(>|\\geq?(?![A-Za-z]))([^<>=]+)")
_RISING = {">": "<", "\\ge": "\\le", "\\geq": "\\le"}
_WITH_BASE = re.compile(r"(\d{1,300})_\{?(\d{1,2})\}?")
_BRACES = re.compile(r"(?:\\left)?\\\{.*\\\}", re.DOTALL)
_PARENTHESES = re.compile(r"(?:\\left)?\([^()]*,[^()]*\)", re.DOTALL)


def readable(text: str) -> str:
    """Return the text with degrees, chains of `>` and some names as math-verify reads them."""
    for before, after in _REWRITTEN:
        text = text.replace(before, after)
    text = _OF_DEGREES.sub(r"\\\1(\\frac{\2\\pi}{180})", text)
    chain = None if _is_too_crowded(text) else _FALLING_CHAIN.fullmatch(text)
    if chain is None:
        return text
    high, first, middle, second, low = chain.groups()
    return f"{low}{_RISING[second]} {middle}{_RISING[first]} {high}"


def is_other_base(answer: str, truth: str) -> bool:
    """Return whether both are digits with their base as an index, and differ: math-verify drops the index."""
    number = _WITH_BASE.fullmatch(answer)
    wanted = _WITH_BASE.fullmatch(truth)
    return number is not None and wanted is not None and number.groups() != wanted.groups()


def is_tuple_for_set(answer: str, truth: str) -> bool:
    """Return whether the answer is a tuple or an open interval where the truth is a set in braces."""
    return _BRACES.fullmatch(truth) is not None and _PARENTHESES.fullmatch(answer) is not None


def _is_too_crowded(text: str) -> bool:
    return len(text) > 200 or "\\text" in text or "," in text

"""The reward function `math_verify`: numbers, words and equal strings at once, the rest by
math-verify (sympy), capped.

sympy runs in the reward workers only. Importing this module imports sympy.
"""

import importlib
import logging
import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import sympy

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.signals import SignalReceiver
from megatron_dapo.rewards.answers import final_answer
from megatron_dapo.rewards.exact import as_written, exact_number, is_words, without_units, words
from megatron_dapo.rewards.latex import (
    conclusion,
    has_base,
    is_same_with_base,
    is_tuple_for_set,
    means_something_else,
    readable,
    same_point,
    values_of_equation,
)
from megatron_dapo.rewards.reward_result import Verdict

_TAIL_CHARS = 32768  # searched for the final answer
_SYMPY_CHARS = 1000  # given to sympy
# 12 bare braces already take math-verify 3 s; a continued fraction of 24 takes 0.1 s
_MAX_NESTING = 24
_MAX_COMMAS = 100
_MAX_WAIT = 10  # seconds on the clock for one of CPU time: other processes may have the cores
_TOO_EXPENSIVE = re.compile(
    r"\d{1001}"  # digits of one number
    r"|(?:\^|\*\*)[\s{(+-]*\d{5}"  # exponent
    r"|(?:\^|\*\*)[\s{(]*\d+[\s})]*(?:\^|\*\*)[\s{(]*\d"  # tower of powers
    r"|\d{5}[\s})]*!"  # factorial
    r"|![\s})]*[})][\s})]*!"  # factorial of a factorial
)
_SEVERAL_NUMBERS = re.compile(r"-?\d+(?:\s+-?\d+)+")  # math-verify adds them up
# math-verify takes one of its numbers
_LIST_WITH_DOTS = re.compile(r"\d\s*,\s*(?:\\[lc]?dots|\.{3}|\u2026)")
# letters outside commands, functions and "or": a sentence; math-verify would take its number
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|ln|log|exp|pi|or|and)\b)[A-Za-z]{2,}")
# invisible; math-verify reads the empty set
_EMPTY_GROUP = re.compile(r"(?<![\\A-Za-z}])\{(?:\s|\{\s*\})*\}")
_COMMENT = re.compile(r" \((?!or\b|and\b|mod\b)[A-Za-z]{2,}[ ,][^()]*\)[.\s]*")
_TEXT = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z .,]*\})?")

# math-verify's own time limits are switched off below (one limit for the whole comparison replaces
# them); it warns.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def _math_verify() -> Any:
    """Import math-verify and have it read a fraction. Raises UserError on failure: its parser needs
    certain versions of the antlr runtime, which other packages replace."""
    try:
        module = importlib.import_module("math_verify")
        parsed = module.parse("\\boxed{\\frac{1}{2}}", parsing_timeout=None)
        fault = "" if parsed and not isinstance(parsed[0], str) else f"it reads {parsed} out of \\frac{{1}}{{2}}"
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise UserError(
            f"reward.function: math_verify does not work here ({fault}), with antlr4-python3-runtime "
            f"{_version('antlr4-python3-runtime')} and math-verify {_version('math-verify')}; install the "
            f"versions that requirements/ pins."
        )
    return module


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(none)"


sympy_verify = _math_verify()


def math_verify(
    data_source: str, response: str, ground_truth: str, extra_info: dict, *, time_limit_s: float = 2.0
) -> Verdict:
    r"""Return 1 if the response's final answer equals the ground truth as mathematics, else 0.

    The final answer is the last `\boxed{...}` or `Answer: ...`, or math-verify's find in the last
    1000 characters. Written-out numbers are compared exactly, except a decimal with a fraction,
    which math-verify rounds to six places. Answers too long, too deeply nested (over 24) or too big
    (exponents, factorials) for sympy are right only if written like the ground truth.

    The limit is a signal: outside the main thread only the reward pool's deadline holds.

    Raises:
        TimeoutError: after `time_limit_s` of sympy (CPU time).
        ValueError: if the ground truth is no mathematics.
    """
    with _time_limit(time_limit_s):
        correct = _is_right(response, ground_truth)
    final = final_answer(response[-_TAIL_CHARS:])
    pred = {"pred": _written_alike(final[1])} if final else {}
    return {"score": 1.0 if correct else 0.0, "correct": correct, **pred}


def _written_alike(answer: str) -> str:
    """Return a normal form that answers share if they are equal without sympy."""
    plain = without_units(answer)
    number = exact_number(plain)
    return str(number) if number is not None else words(plain) or as_written(plain)


def _is_right(response: str, ground_truth: str) -> bool:
    final = final_answer(response[-_TAIL_CHARS:])
    truth = without_units(ground_truth)
    if final is None:
        return _is_equal_to_sympy(response[-_SYMPY_CHARS:], truth)
    kind, answer = final
    return _is_equal(kind, without_units(_without_comment(answer) if kind == "line" else answer), truth)


def _is_equal(kind: str, answer: str, truth: str) -> bool:
    """Return whether an answer is the truth; both without delimiters and units."""
    number, wanted = exact_number(answer), exact_number(truth)
    if number is not None and wanted is not None and (number == wanted or not _is_rounding(answer, truth)):
        return number == wanted
    if number is None and wanted is None and as_written(answer) == as_written(truth):
        return True
    if not answer.strip("{} "):
        return False
    if is_words(truth):
        return words(answer) == words(truth)
    if is_too_expensive(answer):
        return False
    answer = conclusion(answer)
    if _is_other_kind(answer, truth, wanted is not None):
        return False
    if has_base(answer) or has_base(truth):
        return is_same_with_base(answer, truth)
    if (pairs := same_point(answer, truth)) is not None:
        return bool(pairs) and all(_is_equal("boxed", *map(without_units, pair)) for pair in pairs)
    values = [] if "=" in truth else values_of_equation(answer)
    if values:
        return all(_is_equal("boxed", without_units(value), truth) for value in values)
    return _is_equal_to_sympy(_for_sympy(kind, readable(answer)), truth)


def _is_other_kind(answer: str, truth: str, is_number: bool) -> bool:
    """Return whether math-verify could mistake the answer for a truth of another kind."""
    return (
        _SEVERAL_NUMBERS.fullmatch(answer) is not None
        or (is_number and _LIST_WITH_DOTS.search(answer) is not None)
        or means_something_else(answer, truth)
        or is_tuple_for_set(answer, truth)
    )


def _is_equal_to_sympy(text: str, truth: str) -> bool:
    if is_too_expensive(text):
        return False
    gold = _parse_truth(truth)
    parsed = _with_imaginary_unit(sympy_verify.parse(_EMPTY_GROUP.sub("", text), parsing_timeout=None))
    rounding = _decimal_places(exact_number(truth))
    # x > 2 is (2, oo), whichever of the two is the truth
    return sympy_verify.verify(
        gold, parsed, float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=None
    )


def _without_comment(line: str) -> str:
    """Return an answer line without words in parentheses at its end: `12 (see above, by symmetry)`;
    `(mod 7)`,
    `(or 13)` are no comments."""
    start = line.rfind(" (")
    return line[:start] if start > 0 and _COMMENT.fullmatch(line, start) else line


def _is_rounding(answer: str, truth: str) -> bool:
    """Return whether one is a decimal and the other a fraction, possibly rounded; other pairs are
    exact."""
    return ("." in answer) != ("." in truth) and ("/" in answer + truth or "frac" in answer + truth)


def _decimal_places(truth: Fraction | None) -> int:
    """Return the decimal places to which math-verify rounds in comparisons with a decimal.

    Six, or for a small truth six significant digits.
    """
    return max(6, 5 - math.floor(math.log10(abs(truth)))) if truth else 6


def is_too_expensive(text: str) -> bool:
    """Return True if sympy could take seconds: length, nesting, number of elements, exponents,
    factorials."""
    return (
        len(text) > _SYMPY_CHARS
        or text.count(",") > _MAX_COMMAS
        or _nesting(text) > _MAX_NESTING
        or _TOO_EXPENSIVE.search(text) is not None
    )


def _for_sympy(kind: str, answer: str) -> str:
    """Return the text math-verify looks at. It needs LaTeX to stand between delimiters."""
    return answer if kind == "line" and _is_prose(answer) else f"\\boxed{{{answer}}}"


def _is_prose(line: str) -> bool:
    r"""Return whether an answer line has words around its mathematics: `5 apples`, `the root is
    $\sqrt 2$`."""
    return any(mark in line for mark in ("$", "\\(", "\\[")) or _PROSE.search(_TEXT.sub("", line)) is not None


@lru_cache(maxsize=8192)
def _parse_truth(ground_truth: str) -> list:
    parsed = sympy_verify.parse(f"\\boxed{{{readable(ground_truth.strip().strip('$'))}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"ground truth {ground_truth[:80]!r} is no expression that math-verify can read")
    return _with_imaginary_unit(parsed)


def _with_imaginary_unit(parsed: list) -> list:
    """Return the parsed parts with i as the square root of -1, if i is the only letter."""
    return [_imaginary(part) if _is_in_i_alone(part) else part for part in parsed]


def _is_in_i_alone(part: Any) -> bool:
    return {str(symbol) for symbol in getattr(part, "free_symbols", ())} == {"i"}


def _imaginary(part: Any) -> Any:
    return part.subs(dict.fromkeys(part.free_symbols, sympy.I))


def _nesting(text: str) -> int:
    depth = 0
    deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth = max(depth - 1, 0)
    return deepest


class _TimeUp(BaseException):
    """Not an Exception, since sympy and math-verify catch those."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds` of this process's CPU time, or
    _MAX_WAIT times that on the clock, which ends sleeping code too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def time_up(_: signal.Signals) -> None:
        raise _TimeUp

    with SignalReceiver((signal.SIGPROF, signal.SIGALRM), time_up):
        # again every second: Python prints and drops an exception raised in a destructor or a gc
        # callback
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
        signal.setitimer(signal.ITIMER_REAL, _MAX_WAIT * seconds, 1.0)
        try:
            yield
        except _TimeUp:
            raise TimeoutError(f"no verdict within {seconds:g} s of CPU time, or {_MAX_WAIT} times that") from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)

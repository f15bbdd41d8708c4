r"""Forms that math-verify misreads: LaTeX, equations, digits with a base, values of several
variables."""

import re
from collections.abc import Iterable

from megatron_dapo.rewards.exact import exact_number

_REWRITTEN = (
    ("\u00b0", "^\\circ"),
    ("\\varnothing", "\\emptyset"),
    ("\\log_e", "\\ln"),
    ("\\log_{e}", "\\ln"),
    ("\\langle", "("),
    ("\\rangle", ")"),
)
# math-verify drops the degree sign
_OF_DEGREES = re.compile(r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d{1,6})\s*\^\{?\\circ\}?\s*[)}]?")
_FALLING_CHAIN = re.compile(r"([^<>=]+?)(>|\\geq?(?![A-Za-z]))([^<>=]+?)(>|\\geq?(?![A-Za-z]))([^<>=]+)")
_RISING = {">": "<", "\\ge": "\\le", "\\geq": "\\le"}
_WITH_BASE = re.compile(r"\(?([\dA-Z]{1,300})\)?_(?:\{?(\d{1,2})\}?|\{\\text\{([a-z]+)\}\})")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_IMPLICATION = re.compile(r"\\(?:Rightarrow|implies|therefore)(?![A-Za-z])|[\u21d2\u2234]")
# math-verify reads over these
_CHANGES_MEANING = re.compile(
    r"\\(?:to|(?:long|left)?rightarrow|mapsto|iff|Leftrightarrow|neg|lnot|land|lor|wedge|vee)(?![A-Za-z])"
    "|[\u2192\u21a6\u00ac\u2227\u2228]"
)
_UNDER_LIMIT = re.compile(r"(?<=\\lim)\s*_\s*\{[^{}]*\}")  # x \to 0
_IS_NOT = re.compile(r"[^,;()\\]*(?:\\neq?(?![A-Za-z])|\\not\s*=|\u2260)[^,;]*")
_RELATION = re.compile(r"[<>!:]=")
_NAME = re.compile(r"\|?(?!\\pi)(?:\\?[A-Za-z]+)(?:_\{?\w{1,9}\}?)?(?:\([^()]{0,30}\))?\|?")
_MARKUP = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}|\\[A-Za-z]+")
_VARIABLE = re.compile(r"([A-Za-z](?:_\{?\w\}?)?)")
_AND = re.compile(r",?\s*\\text\{\s*and\s*\}|,?\s+and\s+|;")
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


def conclusion(answer: str) -> str:
    """Return the text after the last sign of an implication, or the whole answer."""
    return _IMPLICATION.split(answer)[-1].strip()


def means_something_else(answer: str, truth: str) -> bool:
    """Return whether the answer has a mapping, a limit or a negation, and the truth has not."""
    answer, truth = (_UNDER_LIMIT.sub("", text) for text in (answer, truth))
    marks = {*_CHANGES_MEANING.findall(answer)} - {*_CHANGES_MEANING.findall(truth)}
    return bool(marks) or (_IS_NOT.fullmatch(answer) is not None and _IS_NOT.fullmatch(truth) is None)


def has_base(answer: str) -> bool:
    """Return whether an answer is digits with their base as an index."""
    return _base_and_digits(answer) is not None


def is_same_with_base(answer: str, truth: str) -> bool:
    """Return whether two integers are equal, at least one of them written with its base as an
    index.

    If the truth has another base than ten, the answer must have that base.
    """
    said, wanted = _base_and_digits(answer), _base_and_digits(truth)
    if wanted is not None and wanted[0] != 10:
        return said == wanted
    value = exact_number(answer) if said is None else _integer(*said)
    return value is not None and value == (exact_number(truth) if wanted is None else _integer(*wanted))


def _base_and_digits(answer: str) -> tuple[int, str] | None:
    match = _WITH_BASE.fullmatch(answer)
    base = 0 if match is None else int(match[2] or _BASES.get(match[3], 0))
    if match is None or not 2 <= base <= 36 or not (match[1].isdecimal() or _integer(base, match[1]) is not None):
        return None
    return base, match[1]


def _integer(base: int, digits: str) -> int | None:
    try:
        return int(digits, base)
    except ValueError:
        return None


def values_of_equation(answer: str) -> list[str]:
    """Return the sides of an equation that are no names: 3+4 and 7 of `x = 3+4 = 7`. [] for
    anything else."""
    sides = _parts(answer, "=")
    if len(sides) < 2 or "," in answer or _RELATION.search(answer) or not all(sides):
        return []
    values = [side for side in sides if not _NAME.fullmatch(side)]
    return values if len(values) == 1 or not any(map(_has_letters, values)) else []


def _has_letters(side: str) -> bool:
    return any(map(str.isalpha, _MARKUP.sub("", side)))


def same_point(answer: str, truth: str) -> list[tuple[str, str]] | None:
    """Return the pairs of values to compare for a list of several variables' values (`x=1, y=2`).

    The other side must be such a list too, or a tuple in the variables' order. No pairs: they
    differ. None for anything else.
    """
    said, wanted = _assignments(answer), _assignments(truth)
    if said and wanted:
        return [(said[name], wanted[name]) for name in wanted] if said.keys() == wanted.keys() else []
    if not said and not wanted:
        return None
    values = _values(truth if said else answer)
    named = said or wanted
    in_order = [named[name] for name in (named if wanted else _in_order(named))]
    if values is None or len(values) != len(named):
        return []
    return list(zip(in_order, values, strict=True) if said else zip(values, in_order, strict=True))


def _in_order(names: Iterable[str]) -> list[str]:
    """Return variables in the order of a tuple: x, y, z and x_1, x_2 by themselves, others as they
    are named."""
    in_order = sorted(names)
    return in_order if ord(in_order[-1][0]) - ord(in_order[0][0]) < len(in_order) else [*names]


def _assignments(text: str) -> dict[str, str]:
    """Return variable -> value of an answer with one value each for at least two variables, else
    {}."""
    sides = _parts(text, "=")
    if len(sides) == 2 and (names := _values(sides[0])) and all(map(_VARIABLE.fullmatch, names)):
        values = _values(sides[1]) or []
        pairs = list(zip(names, values, strict=True)) if len(names) == len(values) else []
    else:
        parts = [part.partition("=") for part in _parts(_AND.sub(",", text))]
        pairs = [(name.strip(), value.strip()) for name, _, value in parts]
    is_whole = all(_VARIABLE.fullmatch(name) and value and "=" not in value for name, value in pairs)
    return dict(pairs) if is_whole and 2 <= len(pairs) == len(dict(pairs)) else {}


def _values(text: str) -> list[str] | None:
    """Return the parts of a tuple in parentheses or without them."""
    plain = text.replace("\\left", "").replace("\\right", "").strip()
    if plain.startswith("(") and plain.endswith(")"):
        plain = plain[1:-1]
    parts = _parts(plain)
    return parts if len(parts) > 1 else None


def _parts(text: str, separator: str = ",") -> list[str]:
    """Return the text between the commas, or equals signs, outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def is_tuple_for_set(answer: str, truth: str) -> bool:
    """Return whether the answer is a tuple or an open interval, but the truth a set in braces."""
    return _BRACES.fullmatch(truth) is not None and _PARENTHESES.fullmatch(answer) is not None


def _is_too_crowded(text: str) -> bool:
    return len(text) > 200 or "\\text" in text or "," in text

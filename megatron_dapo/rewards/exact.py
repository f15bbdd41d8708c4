r"""What can be compared without sympy: numbers that are written out, words, and two answers written alike.

Nothing here drops a part of an answer: `x=1,x=2` is not 2, and `1,2` is not 12.
"""

import re
from fractions import Fraction

_DIGITS = r"\d{1,300}"
# by commas, `{,}`, `\,` or blanks; 1, 234 are two numbers
_THOUSANDS = r"[1-9]\d{0,2}(?:(?:,|\{,\}|\\,| )\d{3}){1,99}"
_SEPARATORS = re.compile(r",|\{,\}|\\,| ")
_NUMBER = re.compile(
    rf"(?P<sign>[-+\u2212]?) ?"
    rf"(?:(?P<whole>{_THOUSANDS}|{_DIGITS})?(?:\.(?P<decimals>\d{{0,300}}))?(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?"
    rf"|(?P<over>{_DIGITS}) ?/ ?(?P<under>{_DIGITS})"
    rf"|\\[dt]?frac\{{(?P<top>{_DIGITS})\}}\{{(?P<bottom>{_DIGITS})\}})"
)
_PERIOD = re.compile(
    r"(?P<sign>[-+\u2212]?)(?P<whole>\d{1,300})\.(?P<decimals>\d{0,99})\\overline\{(?P<period>\d{1,99})\}"
)
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
# white space that separates nothing: beside a sign, a bracket or the end, but not in `1 1/2`
_IDLE_SPACE = re.compile(r"(?<![\w}])\s+|\s+(?![\w\\{])|\\[,;!]|\\ ")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}\\$]*)\}")
_OVERLINE = re.compile(r"\\overline\{([A-Z]+)\}")  # a segment; of digits it is a period
_UNITS = re.compile(r"(?<=[\d}])\s*(?:dollars?|points?|integers?)$")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
_MIN_LETTERS = 4  # abc is a product, as good as cba
_MIN_MARKED_LETTERS = 2  # of what LaTeX calls text; one letter is a choice, which may stand in brackets


def without_delimiters(answer: str) -> str:
    """Return an answer without the marks of mathematics, of bold text and of a sentence's end around it."""
    answer = answer.strip(" \t\r\n*`")
    for begin, end in _DELIMITERS:
        inner = answer.removesuffix(".").removeprefix(begin).removesuffix(end)
        if answer.startswith(begin) and len(inner) < len(answer) and begin not in inner and end not in inner:
            answer = inner.strip()
    return answer.removesuffix(".").rstrip()


def without_units(answer: str) -> str:
    """Return an answer without the words for units behind its number that math-verify takes for products of letters."""
    return _UNITS.sub("", without_delimiters(answer))


def as_written(answer: str) -> str:
    """Return the answer without delimiters, fonts and idle white space. Equal strings are equal answers."""
    plain = _TEXT.sub(r"\1", without_delimiters(answer).replace("\\left", "").replace("\\right", ""))
    return _IDLE_SPACE.sub("", _OVERLINE.sub(r"\1", plain))


def exact_number(answer: str) -> Fraction | None:
    """Return the value of an integer, a decimal, which may have a period, or a fraction of integers that is written
    out; None for all else."""
    plain = without_delimiters(answer)
    match = _NUMBER.fullmatch(plain)
    if match is None:
        return _repeating_decimal(plain)
    part = match.groupdict()
    numerator = part["over"] or part["top"]
    denominator = part["under"] or part["bottom"]
    if numerator is not None:
        value = None if int(denominator) == 0 else Fraction(int(numerator), int(denominator))
    elif part["whole"] or part["decimals"]:
        whole = _SEPARATORS.sub("", part["whole"] or "0")
        decimals = part["decimals"] or ""
        value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(part["exponent"] or 0)
    else:
        value = None
    return -value if value is not None and part["sign"] in ("-", "\u2212") else value


def _repeating_decimal(plain: str) -> Fraction | None:
    match = _PERIOD.fullmatch(plain)
    if match is None:
        return None
    part = match.groupdict()
    shift = 10 ** len(part["decimals"])
    period = Fraction(int(part["period"]), 10 ** len(part["period"]) - 1)
    value = (int(part["whole"] + part["decimals"]) + period) / shift
    return -value if part["sign"] in ("-", "\u2212") else value


def words(answer: str) -> str | None:
    r"""Return the words of an answer that is words alone (a day, a name, `\text{yes}`); None for all else."""
    text = _text(without_delimiters(answer))
    return text.casefold() if _WORDS.fullmatch(text) else None


def is_words(truth: str) -> bool:
    """Return whether a truth is to be compared as words: as mathematics, `listen` and `silent` are the same product."""
    plain = without_delimiters(truth)
    text = _text(plain)
    longest = max(map(len, text.split()), default=0)
    return _WORDS.fullmatch(text) is not None and longest >= (_MIN_LETTERS if text == plain else _MIN_MARKED_LETTERS)


def _text(plain: str) -> str:
    return " ".join(_TEXT.sub(r"\1", plain).split())

r"""Comparisons without sympy: written-out numbers, words, and answers written alike.

No part of an answer is dropped: `x=1,x=2` is not 2, and `1,2` is not 12.
"""

import re
import unicodedata
from fractions import Fraction

_DIGITS = r"\d{1,300}"
# by commas, `{,}`, LaTeX's spaces, apostrophes or blanks; 1, 234 are two numbers
_SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\[,;: ]|[ ~'\u2019])"
_THOUSANDS = rf"[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}}){{1,99}}"
_SEPARATORS = re.compile(_SEPARATOR)
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?"
    rf"(?:(?P<whole>{_THOUSANDS}|{_DIGITS})?(?:\.(?P<decimals>\d{{0,300}}))?"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,3}})"
    rf"|\s?(?:\\times|\\cdot|[\u00d7\u00b7*])\s?10\s?\^(?:\{{\s?(?P<power>[-+]?\d{{1,3}})\s?\}}|(?P<digit>\d)))?"
    rf"|(?:(?P<units>{_DIGITS})(?: |\\[,; ]){{1,2}})?(?P<over>{_DIGITS}) ?/ ?(?P<under>{_DIGITS})"
    rf"|\\[dt]?frac\{{(?P<top>{_DIGITS})\}}\{{(?P<bottom>{_DIGITS})\}})"
)
_PERIOD = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d{0,300})\.(?:"
    r"(?P<decimals>\d{0,99})\\(?:overline|bar|dot)\{(?P<period>\d{1,99})\}"
    # 0.1666...
    r"|(?P<first>\d{0,20}?)(?P<repeated>\d{1,9}?)(?P=repeated){2,20}(?:\.{3}|\\[lc]?dots|\u2026))"
)
# 3\u20135 is a range
_DASHES = re.compile("[\u2010-\u2012\u2212\uff0d]|(?<!\\d)\u2013|\u2013(?!\\d)")
_BLANKS = re.compile("[\u00a0\u2009\u202f]")
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_CURRENCY = re.compile(r"^([-+]?)(?:US)?(?:\\?\$|\\text\{\\\$\}|[\u20ac\u00a3\u00a5])\s?(?=[\d.])(?!.*\$)")
_ORDINAL = re.compile(r"(?<=\d)\^?\{?\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\}?$")
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
# white space that separates nothing: beside a sign, a bracket or the end, but not in `1 1/2`
_IDLE_SPACE = re.compile(r"(?<![\w}])\s+|\s+(?![\w\\{])|\\[,;!]|\\ ")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}\\$]*)\}")
_OVERLINE = re.compile(r"\\overline\{([A-Z]+)\}")  # a segment; of digits it is a period
_UNITS = re.compile(r"(?<=[\d}])\s*(?:dollars?|points?|integers?)$")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
_MIN_LETTERS = 4  # abc is a product, as good as cba
_MIN_MARKED_LETTERS = 2  # in LaTeX's text; one letter is a choice, possibly in brackets


def _without_delimiters(answer: str) -> str:
    """Return an answer without the surrounding marks of mathematics, bold text, money and a
    sentence's end, with plain dashes, blanks and fractions."""
    answer = _BLANKS.sub(" ", _DASHES.sub("-", answer)).strip(" \t\r\n*`")
    for begin, end in _DELIMITERS:
        inner = answer.removesuffix(".").removeprefix(begin).removesuffix(end)
        if answer.startswith(begin) and len(inner) < len(answer) and begin not in inner and end not in inner:
            answer = inner.strip()
    answer = _VULGAR_FRACTION.sub(_as_fraction, answer).strip()
    answer = _CURRENCY.sub(r"\1", answer)
    return answer if answer.endswith("...") else answer.removesuffix(".").rstrip()


def _as_fraction(match: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/")


def without_units(answer: str) -> str:
    """Return an answer without the words for units behind its number that math-verify takes for
    products of letters."""
    return _ORDINAL.sub("", _UNITS.sub("", _without_delimiters(answer)))


def as_written(answer: str) -> str:
    """Return the answer without delimiters, fonts and idle white space. Equal strings are equal
    answers."""
    plain = _without_delimiters(answer).replace("\\colon", ":").replace("{:}", ":")
    plain = _TEXT.sub(r"\1", plain.replace("\\left", "").replace("\\right", ""))
    return _IDLE_SPACE.sub("", _OVERLINE.sub(r"\1", plain))


def exact_number(answer: str) -> Fraction | None:
    """Return the value of an integer, a decimal or a fraction of integers; None for anything else.

    A decimal may be periodic or have a power of ten, a fraction may follow an integer.
    """
    plain = _without_delimiters(answer)
    match = _NUMBER.fullmatch(plain)
    if match is None:
        return _repeating_decimal(plain)
    part = match.groupdict()
    numerator = part["over"] or part["top"]
    denominator = part["under"] or part["bottom"]
    if numerator is not None:
        parts = int(numerator), int(denominator)
        value = None if parts[1] == 0 else int(part["units"] or 0) + Fraction(*parts)
    elif part["whole"] or part["decimals"]:
        whole = _SEPARATORS.sub("", part["whole"] or "0")
        decimals = part["decimals"] or ""
        exponent = part["exponent"] or part["power"] or part["digit"]
        value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)
    else:
        value = None
    return -value if value is not None and part["sign"] == "-" else value


def _repeating_decimal(plain: str) -> Fraction | None:
    match = _PERIOD.fullmatch(plain)
    if match is None:
        return None
    part = match.groupdict()
    decimals, digits = part["decimals"] or part["first"] or "", part["period"] or part["repeated"]
    period = Fraction(int(digits), 10 ** len(digits) - 1)
    value = (int(part["whole"] + decimals or "0") + period) / 10 ** len(decimals)
    return -value if part["sign"] == "-" else value


def words(answer: str) -> str | None:
    r"""Return the words of an answer of words only (a day, a name, `\text{yes}`); None for anything
    else."""
    text = _text(_without_delimiters(answer))
    return text.casefold() if _WORDS.fullmatch(text) else None


def is_words(truth: str) -> bool:
    """Return whether a truth is to be compared as words: as mathematics, `listen` and `silent` are
    the same product."""
    plain = _without_delimiters(truth)
    text = _text(plain)
    longest = max(map(len, text.split()), default=0)
    return _WORDS.fullmatch(text) is not None and longest >= (_MIN_LETTERS if text == plain else _MIN_MARKED_LETTERS)


def _text(plain: str) -> str:
    return " ".join(_TEXT.sub(r"\1", plain).split())

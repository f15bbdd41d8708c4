r"""Plain text work on answers: find the final answer in a response and normalize it. No sympy, and
no regular expressions with runaway cost.

The normal form is Minerva's (arXiv 2206.14858, appendix D.1; lm-evaluation-harness, minerva_math),
as in the public DAPO recipe. Order matters: the tables below are applied from top to bottom.
"""

import re

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")

_READ_CHARS = 2000  # characters of a response, for its vote if the reward function names no answer
# the longest answer, and the length of a response's end taken for an unmarked answer
ANSWER_CHARS = 200

_DISPLAYS = (("\\[", "\\]"), ("$$", "$$"))

_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED_WORDS = (
    *(
        "square",
        "ways",
        "integers",
        "dollars",
        "mph",
        "inches",
        "hours",
        "km",
        "units",
        "\\ldots",
        "sue",
        "points",
        "feet",
    ),
    *("minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *(
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
    ),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_TEX_FORMS = (
    (re.compile(r"(?m)^[^$\n]*\$([^$\n]*)\$.*"), r"$\1$"),  # only the first $...$ of a line counts
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 -> \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),  # \sqrt2 -> \sqrt{2}
)


def last_answer_line(text: str) -> str | None:
    """Return the text from the last `Answer:` to the end of its line, or None."""
    matches = _ANSWER_LINE.findall(text)
    return matches[-1] if matches else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, or None. In one
    pass."""
    return _last_boxed_with_position(text)[0]


def final_answer(text: str) -> tuple[str, str] | None:
    """Return (kind, answer) of the last answer: "boxed" or "line", whichever begins later; None
    without one."""
    boxed, boxed_at = _last_boxed_with_position(text)
    lines = list(_ANSWER_LINE.finditer(text))
    if boxed is not None and (not lines or boxed_at >= lines[-1].start()):
        return "boxed", boxed
    return ("line", _whole_display(text, lines[-1])) if lines else None


def answer_of(response: str) -> str | None:
    """Return a response's answer, if its reward function names none: the normalized final answer,
    or else its last 200 characters; None for an empty response."""
    final = final_answer(response[-_READ_CHARS:])
    return (normalize(final[1]) if final else response.strip()[-ANSWER_CHARS:]) or None


def _whole_display(text: str, line: re.Match[str]) -> str:
    r"""Return the answer of a line; if it opens a display (`\[`, `$$`), up to the line that closes
    it."""
    answer = line.group(1)
    for begin, end in _DISPLAYS:
        if answer.startswith(begin) and end not in answer[len(begin) :]:
            closing = text.find(end, line.end())
            last = text.find("\n", closing)
            return answer if closing < 0 else text[line.start(1) : len(text) if last < 0 else last]
    return answer


def normalize(answer: str) -> str:
    """Return the Minerva normal form of an answer. Answers are equal when their normal forms are
    the same string."""
    answer = answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for word in _REMOVED_WORDS:
        answer = answer.replace(word, "")
    for pattern, replacement in _TEX_FORMS:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def _last_boxed_with_position(text: str) -> tuple[str | None, int]:
    openings = {match.end() - 1: match.start() for match in _BOXED.finditer(text)}
    stack: list[int] = []
    last: tuple[str | None, int] = (None, -1)
    for position, character in enumerate(text):
        if character == "{":
            stack.append(position)
        elif character == "}" and stack:
            brace = stack.pop()
            if openings.get(brace, -1) > last[1]:
                last = text[brace + 1 : position], openings[brace]
    return last

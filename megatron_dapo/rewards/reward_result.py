"""The answer of the reward pool."""

from dataclasses import dataclass, field

Verdict = dict[str, float | bool | str | None]
"""The result of a built-in function: score, correct and pred, the response's answer, named as in
verl."""


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one response."""

    score: float
    """With an error, the function's score of a wrong answer."""
    correct: bool
    error: str | None = None
    """None, "timeout", "crash", "crash: ..." or "exception: ..."."""
    answer: str | None = field(default=None, compare=False)
    """The response's answer for majority votes, in a form equal for equal answers, or None. Not
    part of the verdict."""

"""What the reward pool answers."""

from dataclasses import dataclass, field

Verdict = dict[str, float | bool | str | None]
"""What a built-in function returns: score, correct and, as verl's functions do, pred: what the response answers."""


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one response.

    error: None, "timeout", "crash", "crash: ..." or "exception: ..."; with an error `score` is that function's score of
    a wrong answer. answer: what the response answers, in a form in which equal answers are equal; None = nothing. It is
    for a vote among responses, and no part of the verdict.
    """

    score: float
    correct: bool
    error: str | None = None
    answer: str | None = field(default=None, compare=False)

"""What the reward pool answers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one response.

    error: None, "timeout", "crash", "crash: ..." or "exception: ..."; with an error `score` is that function's score of
    a wrong answer.
    """

    score: float
    correct: bool
    error: str | None = None

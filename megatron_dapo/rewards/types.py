"""What goes into the reward pool and what comes out."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one response.

    error: None, "timeout", "crash", "crash: ..." or "exception: ..."; with an error `score` is that function's score of
    a wrong answer.
    """

    score: float
    correct: bool
    error: str | None = None

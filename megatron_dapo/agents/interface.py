"""The records of a rollout function: its task, the endpoint of its model, its outcome."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated

from annotated_types import MaxLen
from pydantic import FiniteFloat

from megatron_dapo.data.chat_messages import Messages


@dataclass(frozen=True)
class AgentTask:
    """An agent's view of one row of the prompt file."""

    prompt: str
    """The rendered text."""
    messages: Messages
    """The row's messages; a text prompt is one user message."""
    data_source: str
    ground_truth: str
    extra_info: dict = field(default_factory=dict)
    number: int = 0
    """Of the trajectory among those of the prompt, from 0."""
    is_validation: bool = False


@dataclass(frozen=True)
class Outcome:
    """An agent's end of a trajectory."""

    reward: FiniteFloat | None = None
    """None: `reward.function` scores the text of the last branch."""
    correct: bool | None = None
    """Needs a reward; None: whether the reward is above 0."""
    error: Annotated[str, MaxLen(1000)] | None = None
    """The reason of a failure of the agent itself; the trajectory still counts."""
    metrics: Annotated[dict[Annotated[str, MaxLen(64)], FiniteFloat], MaxLen(64)] = field(default_factory=dict)
    """Means over the step's trajectories are logged as agent/NAME."""
    answer: Annotated[str, MaxLen(1 << 20)] | None = None
    """Text that `reward.function` scores in place of the last branch's: a patch, a file."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value that no trajectory can hold."""
        if self.reward is not None and not isfinite(self.reward):
            raise ValueError(f"an agent's reward must be a finite number, not {self.reward}")
        if self.correct is not None and self.reward is None:
            raise ValueError("an agent's `correct` needs a `reward`, which may be 0")
        if self.reward is not None and self.answer is not None:
            raise ValueError("an agent gives a `reward`, or an `answer` for reward.function, and not both")

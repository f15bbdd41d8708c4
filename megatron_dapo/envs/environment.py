"""The protocol of an environment."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

Message = dict[str, str]
"""{"role": ..., "content": ...}, as the model's chat template takes it; without a template only the
content counts."""


@dataclass(frozen=True)
class Task:
    """An environment's view of one row of the prompt file."""

    prompt: str
    """The rendered text."""
    data_source: str
    ground_truth: str
    extra_info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """An environment's answer to the start or to a turn of the model."""

    messages: tuple[Message, ...] = ()
    """The model's next input; after `reset` they follow the prompt, before the model's first
    turn."""
    done: bool = False
    """Whether the trajectory ends here."""
    reward: float | None = None
    """The turn's reward; the trajectory's is the sum. If no turn has one, the reward function
    scores the whole text."""
    correct: bool | None = None
    """Whether the task is solved so far; needs a reward. The last value counts; without any, a
    trajectory is correct if its reward is above 0."""

    def __post_init__(self) -> None:
        """Raise ValueError for a field that no trajectory can hold."""
        for message in self.messages:
            fields: dict = message if isinstance(message, dict) else {}
            role = fields.get("role")
            content = fields.get("content")
            if not (isinstance(role, str) and isinstance(content, str)):
                raise ValueError(f"an environment's message needs a role and a content of text, not {message!r:.80}")
            # half a surrogate pair, as JSON from a model may hold, has no tokens
            f"{role}{content}".encode()
        if self.correct is not None and self.reward is None:
            raise ValueError("an environment's `correct` needs a `reward`, which may be 0")
        if self.reward is not None and not isfinite(self.reward):
            raise ValueError(f"an environment's reward must be a finite number, not {self.reward}")


class Environment(Protocol):
    """The world of one trajectory, made with `environment_kwargs`, in a separate worker process.

    reset once, then step after every turn of the model until `done` or a limit, then close. Each
    call has a hard limit in seconds; the event loop runs only during calls.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task. The messages, if any, open the conversation after the prompt's own
        messages."""

    async def step(self, response: str) -> Observation:
        """Answer the model's turn, text without special tokens."""

    async def close(self) -> None:
        """Close the environment after the end of the trajectory.

        Not called if the process had to be killed.
        """

"""The protocol of an environment: what it is told and what it answers."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

Message = dict[str, str]
"""{"role": ..., "content": ...}, as the model's chat template takes it; without a template only the content counts."""


@dataclass(frozen=True)
class Task:
    """One row of the prompt file, as far as an environment needs it. prompt: the rendered text."""

    prompt: str
    data_source: str
    ground_truth: str
    extra_info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """An environment's answer to the start or to a turn of the model.

    messages: what the model reads next; after `reset` they stand behind the prompt, before the model's first turn.
    done: the trajectory ends here. reward: what this turn earned; the trajectory's is the sum, and where no turn named
    one, the reward function scores the whole text. correct: whether the task is solved so far, named with a reward; the
    last word on it holds, and where no turn said one, a trajectory's reward above 0 does.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    correct: bool | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what no trajectory can hold."""
        for message in self.messages:
            fields: dict = message if isinstance(message, dict) else {}
            role = fields.get("role")
            content = fields.get("content")
            if not (isinstance(role, str) and isinstance(content, str)):
                raise ValueError(f"an environment's message needs a role and a content of text, not {message!r:.80}")
            f"{role}{content}".encode()  # half a surrogate pair, as JSON from a model may hold, has no tokens
        if self.correct is not None and self.reward is None:
            raise ValueError("an environment that says correct names a reward with it, which may be 0")
        if self.reward is not None and not isfinite(self.reward):
            raise ValueError(f"an environment's reward must be a finite number, not {self.reward}")


class Environment(Protocol):
    """The world of one trajectory, made with `environment_kwargs`, in a worker process of its own.

    reset once, then step after every turn of the model until `done` or a limit, then close. Each call has a hard limit
    in seconds; the event loop runs only during calls.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task. The messages, if any, open the conversation after the prompt's own messages."""

    async def step(self, response: str) -> Observation:
        """Answer the model's turn, which is text without special tokens."""

    async def close(self) -> None:
        """Close the environment: the trajectory is over, whatever ended it.

        This is not called where the process had to be killed.
        """

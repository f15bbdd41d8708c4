"""A turn of an agent's model, as the gateway asks for it and the controller answers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.data.token_arrays import TokenIds


@dataclass(frozen=True, eq=False)
class Turn:
    """A request for one or more answers to the same tokens."""

    request: int  # its number in the trajectory, from 0; a retry that joins it has the same
    parent: int | None  # the node before; None: `suffix` is a whole prompt
    suffix: TokenIds  # tokens read since the parent's last
    max_new_tokens: int  # room of the branch, less if the client asks for less
    num_answers: int = 1
    stop: tuple[str, ...] = ()  # texts that end an answer; they stay in its tokens


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer: a new node of the trajectory's forest."""

    node: int  # its number in the trajectory, from 0, in the order of their ends
    tokens: TokenIds
    log_probs: tuple[float, ...]
    finish_reason: str  # "stop" | "length"


class TurnRefused(Exception):
    """The trajectory takes no such request; all go to the client. param: the field at fault."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


AnswerTurn = Callable[[Turn], Awaitable[list[Answer]]]
"""Raises TurnRefused; cancelled when the client is gone for good."""


@dataclass(frozen=True)
class Limits:
    """Limits of one trajectory, held by the gateway."""

    max_prompt_tokens: int
    """Of a branch's root."""
    max_response_tokens: int
    """Of a branch behind its root, with what the agent adds."""
    max_turns: int
    max_branches: int
    max_tokens_per_turn: int | None
    max_choices: int


@dataclass
class SessionNotes:
    """What the gateway saw of one trajectory."""

    delivered: set[int] = field(default_factory=set)
    """Nodes whose answers a client has read to the end."""
    counts: dict[str, int] = field(default_factory=dict)
    """By the names of `COUNTS`."""
    refusal: str | None = None
    """Code of the `TurnRefused` that answered the last request for a turn; None if that got an
    answer."""
    posted: Outcome | None = None
    """The agent's own, by POST to the reward's URL; the last one counts."""


COUNTS = {
    "ill_formed": "answers with a call that no parser understands",
    "retokenized": "answers that decoding and encoding would have changed",
    "refused": "requests answered by an error",
    "overruled": "requests whose own sampling parameters the run's replaced",
    "retries": "requests sent again by the client",
}

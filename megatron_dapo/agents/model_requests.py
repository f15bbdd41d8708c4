"""A client's request and its answers, whichever API it speaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_dapo.agents.turns import Answer, TurnRefused

Count = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1, max_length=200)]
Stops = Annotated[list[StopText], Field(max_length=16)]
OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "chat_template_kwargs")
"""Fields of a body that the run's own values replace."""


@dataclass(frozen=True)
class ModelRequest:
    """Messages, or tokens, to be answered."""

    model: str
    messages: list[dict[str, Any]]
    """With role, content (text or None), and if present tool_calls and tool_call_id as in OpenAI's
    API, name, reasoning_content."""
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    is_streamed: bool = False
    wants_usage: bool = True
    """In a stream."""
    wants_log_probs: bool = False
    ids: list[int] | None = None
    """Tokens instead of messages."""


@dataclass(frozen=True)
class Choice:
    """One answer as its client is shown it."""

    answer: Answer
    message: dict[str, Any]
    """As in OpenAI's API; empty for a request in tokens."""
    finish_reason: str
    """stop | length | tool_calls"""
    stop: str | None = None
    """The text of the request's `stop` that ended it."""
    token_texts: Sequence[str] = ()
    """For log-probs; none unless asked for."""


@dataclass(frozen=True)
class Reply:
    """The answers to one request."""

    identity: str
    model: str
    created: int
    choices: Sequence[Choice]
    num_prompt: int
    num_cached: int
    """Of the prompt's tokens: those of an earlier turn."""

    @property
    def num_completion(self) -> int:
        """Return the number of all answers' tokens."""
        return sum(len(choice.answer.tokens) for choice in self.choices)


class Body(BaseModel):
    """Fields of both APIs. Unknown ones are no matter."""

    model_config = ConfigDict(strict=True)

    model: str = ""
    stream: bool = False
    max_tokens: Count | None = None


AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], fields: dict[str, Any], neutral: dict[str, tuple]) -> AnyBody:
    """Return the fields of a body; null is the same as none.

    neutral: fields that would change what is sampled -> their values that ask for nothing.

    Raises TurnRefused.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    for name in neutral.keys() & present.keys():
        if present[name] not in neutral[name]:
            raise TurnRefused(400, "unsupported_parameter", f"{name} is not supported here; leave it out.", name)
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise TurnRefused(400, "invalid_value", words[:500], str(first["loc"][0])) from None


def check_model(wanted: str, name: str) -> None:
    """Raise TurnRefused for another model than ours."""
    if wanted != name:
        words = f"The model {wanted[:100]!r} does not exist; here is {name!r}."
        raise TurnRefused(404, "model_not_found", words, "model")


def check_request(request: ModelRequest, name: str, max_choices: int) -> None:
    """Raise TurnRefused for a request that our model, `name`, cannot answer."""
    check_model(request.model, name)
    if request.num_choices > max_choices:
        raise TurnRefused(400, "invalid_value", f"n must be {max_choices} at most (max_choices).", "n")
    if request.ids is None and (not request.messages or request.messages[-1]["role"] == "assistant"):
        words = "messages must end with a message of another role than assistant: begun answers are not taken."
        raise TurnRefused(400, "invalid_value", words, "messages")

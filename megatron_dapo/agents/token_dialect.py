"""Turns in tokens, for `Endpoint.generate`."""

from typing import Any

from pydantic import BaseModel

from megatron_dapo.agents.chat_dialect import PING, error_body, error_event, events
from megatron_dapo.agents.model_requests import Count, ModelRequest, Reply, read_body

__all__ = ["PING", "body", "error_body", "error_event", "events", "parse"]


class _Body(BaseModel):
    ids: list[int]
    max_tokens: Count | None = None


def parse(fields: dict[str, Any], max_choices: int) -> ModelRequest:
    """Return the request of a body. Raises BadRequest."""
    body = read_body(_Body, fields)
    return ModelRequest("", [], max_tokens=body.max_tokens, ids=body.ids)


def body(reply: Reply) -> Any:
    """Return the only answer."""
    return reply.answers[0]

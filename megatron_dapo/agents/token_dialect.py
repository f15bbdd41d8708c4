"""Turns in tokens, for `Endpoint.generate`."""

from typing import Any

from megatron_dapo.agents.chat_dialect import PING, error_body, error_event, events
from megatron_dapo.agents.model_requests import Body, ModelRequest, Reply, read_body

__all__ = ["PING", "body", "error_body", "error_event", "events", "parse"]


class _TokenBody(Body):
    ids: list[int]


def parse(fields: dict[str, Any], max_choices: int) -> ModelRequest:
    """Return the request of a body. Raises BadRequest."""
    body = read_body(_TokenBody, fields)
    return ModelRequest(body.model, [], max_tokens=body.max_tokens, ids=body.ids)


def body(reply: Reply) -> Any:
    """Return the only answer."""
    return reply.answers[0]

"""Reads outcomes: from a function, a result file, or a request."""

from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_dapo.agents.interface import Outcome

_FIELDS = [field.name for field in fields(Outcome)]
_ADAPTER = TypeAdapter(Outcome)


def outcome_of(value: Any) -> Outcome:
    """Return the outcome that an object of its fields means. Raises ValueError, with a sentence."""
    if not isinstance(value, dict) or not value.keys() <= set(_FIELDS):
        raise ValueError(f"an agent's outcome is an object with some of {', '.join(_FIELDS)}, not {str(value)[:100]}")
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"an agent's outcome{place and f', {place}'}: {first['msg']}") from None

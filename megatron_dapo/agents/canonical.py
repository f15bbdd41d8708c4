"""Chat messages in one form: hashed, to find a conversation again, and as a chat template reads them.

Clients send the same message with other white space in JSON, with null for an empty text, with text
in parts, and with fields of their own.
"""

import hashlib
import json
from typing import Any

from megatron_dapo.common.bounded import parse_json

Message = dict[str, Any]


def digest(before: bytes, value: Any) -> bytes:
    """Return the hash of a JSON value behind others."""
    return hashlib.sha256(before + json.dumps(_plain(value), sort_keys=True).encode()).digest()


def message_digest(before: bytes, message: Message) -> bytes:
    """Return the hash of a conversation with one message more: of its role, text and calls."""
    calls = [[call["function"]["name"], _value(call["function"]["arguments"])] for call in calls_of(message)]
    return digest(before, [message["role"], _text(message), calls])


def calls_of(message: Message) -> list[Message]:
    """Return the calls of tools of a message."""
    return message.get("tool_calls") or []


def call_ids(message: Message) -> set[str]:
    """Return the ids of the calls of a message."""
    return {call["id"] for call in calls_of(message)}


def template_message(message: Message, arguments_are_text: bool) -> Message:
    """Return a message for a chat template.

    arguments_are_text: it reads a call's arguments as JSON text, else as an object.
    """
    shown = {**message, "content": _text(message)}
    if thoughts := shown.get("reasoning_content"):
        if not (calls_of(message) and shown["content"]):  # which gpt-oss' template refuses together
            shown["thinking"] = thoughts
    if "tool_call_id" in shown:
        shown["tool_call_id"] = _short(shown["tool_call_id"])
    if "tool_calls" in shown:
        shown["tool_calls"] = [
            {**call, "id": _short(call["id"]), "function": _function(call["function"], arguments_are_text)}
            for call in calls_of(message)
        ]
    return shown


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _function(function: Message, arguments_are_text: bool) -> Message:
    return function if arguments_are_text else {**function, "arguments": _value(function["arguments"])}


def _value(arguments: str) -> Any:
    """Return the JSON value of a call's arguments; a text that is no JSON as it is."""
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments


def _short(name: str) -> str:
    """Return the id of a call as Mistral's templates require it, 9 letters and digits."""
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as such: JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

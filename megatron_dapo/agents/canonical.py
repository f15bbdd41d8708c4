"""Chat messages in one form: hashed, to find a conversation again, and as a template reads them.

Clients send the same message with other white space in JSON, with null for an empty text, with text
in parts, and with fields of their own.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_dapo.common.bounded import parse_json


def role_of(message: Mapping[str, Any]) -> str:
    """Return the role of a message by the name that templates know."""
    return {"developer": "system", "function": "tool"}.get(message["role"], message["role"])


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, its parts joined. Raises ValueError for other parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"a message's content must be text or a list of text parts, not {content!r:.40}")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a message's content has a part that is no text")
    return "".join(map(str, texts))


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the thoughts that came with a message, "" without."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return thoughts if isinstance(thoughts, str) else ""


def call_ids(message: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of the calls of a message."""
    return frozenset(str(call.get("id")) for call in _calls(message))


def digest(before: bytes, value: Any) -> bytes:
    """Return the hash of a JSON value behind others."""
    return hashlib.sha256(before + json.dumps(_plain(value), sort_keys=True).encode()).digest()


def message_digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the hash of a conversation with one message more.

    It reads role, text and calls, each as its name with the JSON value of its arguments. Raises
    ValueError for a malformed message.
    """
    calls = [[call["function"]["name"], _arguments(call)] for call in _calls(message)]
    return digest(before, [role_of(message), text_of(message), calls])


def template_message(message: Mapping[str, Any], arguments_are_text: bool, are_ids_short: bool) -> dict[str, Any]:
    """Return a message for a chat template.

    Args:
        message: as a client sent it.
        arguments_are_text: the template shows a call's arguments as they are, a JSON text; else it
            reads an object.
        are_ids_short: it takes only ids of 9 letters and digits, as Mistral's.
    """
    shown: dict[str, Any] = {"role": role_of(message), "content": text_of(message)}
    if isinstance(name := message.get("name"), str):
        shown["name"] = name
    if (of := message.get("tool_call_id")) is not None:
        shown["tool_call_id"] = _short(str(of)) if are_ids_short else str(of)
    if calls := _calls(message):
        shown["tool_calls"] = [
            {
                "id": _short(str(call.get("id"))) if are_ids_short else str(call.get("id")),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _shown(call, arguments_are_text)},
            }
            for call in calls
        ]
    if thoughts := reasoning_of(message):
        shown["reasoning_content"] = thoughts
        if not (calls and shown["content"]):  # which gpt-oss' template refuses together
            shown["thinking"] = thoughts
    return shown


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool call must have a function with a name, not {call!r:.40}")
    return calls


def _arguments(call: Mapping[str, Any]) -> Any:
    """Return the JSON value of a call's arguments; a text that is no JSON as it is."""
    arguments = call["function"].get("arguments") or {}
    try:
        return parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _shown(call: Mapping[str, Any], as_text: bool) -> Any:
    arguments = call["function"].get("arguments") or {}
    if not as_text:
        return _arguments(call)
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _short(name: str) -> str:
    return name if len(name) == 9 and name.isalnum() else hashlib.sha256(name.encode()).hexdigest()[:9]


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as such: JavaScript writes 1.0 as 1."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list) else value

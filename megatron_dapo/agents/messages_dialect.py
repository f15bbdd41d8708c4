"""Anthropic's messages: requests, answers, streams and errors as its clients write and read them."""

from collections.abc import Iterator
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from megatron_dapo.agents.model_requests import Body, ModelRequest, Reply, Stops, read_body
from megatron_dapo.agents.turns import TurnRefused

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_NEUTRAL: dict[str, tuple] = {"mcp_servers": ([],), "container": ()}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}


class _TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class _Block(BaseModel):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of a call
    name: str | None = None
    input: dict[str, Any] = {}
    tool_use_id: str | None = None
    content: str | list[_TextBlock] | None = None  # of a result

    def need(self, name: str) -> str:
        """Return a field that its type has. Raises TurnRefused."""
        if (text := getattr(self, name)) is None:
            raise TurnRefused(400, "invalid_value", f"messages: a {self.type} block needs {name}.", "messages")
        return text


class _BlockMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _CustomTool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}


class _MessagesBody(Body):
    messages: list[_BlockMessage]
    system: str | list[_TextBlock] = ""
    tools: list[_CustomTool] = []
    tool_choice: dict[str, Literal["auto", "any", "none"] | bool] = {}
    stop_sequences: Stops = []
    output_config: dict[str, str | None] = {}  # a format of the answer is an object


def parse(fields: dict[str, Any]) -> ModelRequest:
    """Return the request of a body; max_tokens may be missing, as in count_tokens. Raises
    TurnRefused."""
    body = read_body(_MessagesBody, fields, _NEUTRAL)
    system = _text(body.system, "\n")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += _messages(message)
    functions = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in body.tools
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    return ModelRequest(
        model=body.model,
        messages=messages,
        tools=tools if tools and body.tool_choice.get("type") != "none" else None,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences),
        is_streamed=body.stream,
    )


def _messages(message: _BlockMessage) -> Iterator[dict[str, Any]]:
    """Yield a message as OpenAI's API has it: a tool's result is a message of its own."""
    own: dict[str, Any] = {}  # a message under way
    blocks = message.content if isinstance(message.content, list) else [_Block(type="text", text=message.content)]
    for block in blocks:
        if block.type == "tool_result":
            if own:
                yield {"role": message.role, "content": None, **own}
                own = {}
            content = _text(block.content or "")
            yield {"role": "tool", "tool_call_id": block.need("tool_use_id"), "content": content}
        elif block.type == "tool_use":
            function = {"name": block.need("name"), "arguments": orjson.dumps(block.input).decode()}
            call = {"id": block.need("id"), "type": "function", "function": function}
            own.setdefault("tool_calls", []).append(call)
        elif block.type == "redacted_thinking":
            own.setdefault("content", None)
        else:
            field = {"text": "content", "thinking": "reasoning_content"}[block.type]
            own[field] = (own.get(field) or "") + block.need(block.type)
    if own or not blocks:
        yield {"role": message.role, "content": None, **own}


def _text(content: str | list[_TextBlock], between: str = "") -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)


def body(reply: Reply) -> dict[str, Any]:
    """Return the answer that is not streamed; it has one choice."""
    usage = {**_read(reply), "output_tokens": reply.num_completion}
    return {**_head(reply), "content": _blocks(reply), **_end(reply), "usage": usage}


def events(reply: Reply, wants_usage: bool) -> Iterator[bytes]:
    """Yield the events of a streamed answer."""
    usage = {**_read(reply), "output_tokens": 0}
    start = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event({"type": "message_start", "message": start})
    for index, block in enumerate(_blocks(reply)):
        kind = block["type"]
        if kind == "tool_use":
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        else:
            start = {**block, kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield event({"type": "content_block_start", "index": index, "content_block": start})
        yield event({"type": "content_block_delta", "index": index, "delta": delta})
        yield event({"type": "content_block_stop", "index": index})
    yield event({"type": "message_delta", "delta": _end(reply), "usage": {"output_tokens": reply.num_completion}})
    yield event({"type": "message_stop"})


def error_body(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    """Return the body of a refusal. Harnesses shorten their history by the words of the message."""
    words = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": words, "param": param, "code": code}}


def event(fields: dict[str, Any]) -> bytes:
    """Return one event of a stream; that of an `error_body` is the last."""
    return b"event: " + fields["type"].encode() + b"\ndata: " + orjson.dumps(fields) + b"\n\n"


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.identity}", "type": "message", "role": "assistant", "model": reply.model}


def _read(reply: Reply) -> dict[str, int]:
    """Return the numbers of read tokens: those of the cache are not among the others."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": reply.num_cached}
    return {"input_tokens": reply.num_prompt - reply.num_cached, **cached}


def _end(reply: Reply) -> dict[str, Any]:
    (choice,) = reply.choices
    reason = _STOP_REASONS[choice.finish_reason] if choice.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    message = reply.choices[0].message
    blocks: list[dict[str, Any]] = []
    if thoughts := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    calls = message.get("tool_calls", ())
    if message["content"] or not (blocks or calls):  # clients want one block at least
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _object(function)})
    return blocks


def _object(function: dict[str, str]) -> dict[str, Any]:
    """Return a call's arguments; the API has no others than objects."""
    try:
        value = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}

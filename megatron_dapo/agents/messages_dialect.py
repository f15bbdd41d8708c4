"""Anthropic's messages: requests, answers, streams and errors as its clients write and read them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Discriminator

from megatron_dapo.agents.model_requests import Body, ModelRequest, Reply, Stops, answerable, read_body

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


class _ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str


class _RedactedBlock(BaseModel):
    type: Literal["redacted_thinking"]


class _CallBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}


class _ResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_TextBlock] | None = None


_AnyBlock = _TextBlock | _ThinkingBlock | _RedactedBlock | _CallBlock | _ResultBlock


class _BlockMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[_AnyBlock, Discriminator("type")]]


class _CustomTool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}


class _ToolChoice(BaseModel):
    type: Literal["auto", "any", "none"] = "auto"


class _OutputConfig(BaseModel):
    format: None = None


class _MessagesBody(Body):
    messages: list[_BlockMessage]
    system: str | list[_TextBlock] = ""
    tools: list[_CustomTool] = []
    tool_choice: _ToolChoice = _ToolChoice()
    stop_sequences: Stops = []
    output_config: _OutputConfig = _OutputConfig()


def parse(fields: dict[str, Any], max_choices: int) -> ModelRequest:
    """Return the request of a body; max_tokens may be missing, as in count_tokens. Raises
    BadRequest."""
    body = read_body(_MessagesBody, fields, _NEUTRAL)
    system = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += _messages(message)
    return ModelRequest(
        model=body.model,
        messages=answerable(messages),
        tools=[_tool(tool) for tool in body.tools] if body.tools and body.tool_choice.type != "none" else None,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences),
        is_streamed=body.stream,
    )


def _tool(tool: _CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _messages(message: _BlockMessage) -> Iterator[dict[str, Any]]:
    """Yield a message as OpenAI's API has it: a tool's result is a message of its own."""
    role, blocks = message.role, message.content
    if isinstance(blocks, str):
        blocks = [_TextBlock(type="text", text=blocks)]
    own: dict[str, Any] = {}  # a message under way
    for block in blocks:
        if isinstance(block, _ResultBlock):
            if own:
                yield {"role": role, "content": None, **own}
                own = {}
            content = block.content if isinstance(block.content, str) else _joined(block.content or [])
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, _TextBlock):
            own["content"] = own.get("content", "") + block.text
        elif isinstance(block, _ThinkingBlock):
            own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
        elif isinstance(block, _CallBlock):
            function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
            own.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
    if own or not blocks:
        yield {"role": role, "content": None, **own}


def _joined(blocks: list[_TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def body(reply: Reply) -> dict[str, Any]:
    """Return the answer that is not streamed; it has one choice."""
    usage = {**_read(reply), "output_tokens": reply.num_completion}
    return {**_head(reply), "content": _blocks(reply), **_end(reply), "usage": usage}


def events(reply: Reply, wants_usage: bool) -> Iterator[bytes]:
    """Yield the events of a streamed answer."""
    usage = {**_read(reply), "output_tokens": 0}
    start = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=start)
    for index, block in enumerate(_blocks(reply)):
        name, nothing, delta, word = _DELTAS[block["type"]]
        yield _event("content_block_start", index=index, content_block={**block, name: nothing})
        change = block[name] if isinstance(nothing, str) else orjson.dumps(block[name]).decode()
        yield _event("content_block_delta", index=index, delta={"type": delta, word: change})
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(reply), usage={"output_tokens": reply.num_completion})
    yield _event("message_stop")


# type of a block -> (its growing field, how that begins, type of the change, the change's field)
_DELTAS: dict[str, tuple[str, Any, str, str]] = {
    "text": ("text", "", "text_delta", "text"),
    "thinking": ("thinking", "", "thinking_delta", "thinking"),
    "tool_use": ("input", {}, "input_json_delta", "partial_json"),
}


def error_body(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    """Return the body of a refusal. Harnesses shorten their history by the words of the message."""
    words = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": words, "param": param, "code": code}}


def error_event(fields: dict[str, Any]) -> bytes:
    """Return the last event of a stream that failed."""
    return _event("error", error=fields["error"])


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


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"

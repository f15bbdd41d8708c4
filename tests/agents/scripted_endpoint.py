"""An endpoint with scripted answers, which keeps each request: what a client sends, and bears."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ANSWER_S = 30  # seconds for the start and the end of the endpoint


class Refusal(Exception):
    """Raised by a script: the request is refused with a status and a code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


Script = Callable[[int, dict], dict]
"""(number of the request, its body) -> the assistant's message, in OpenAI's form."""


@dataclass
class ReceivedRequest:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedEndpoint:
    url: str = ""  # without /v1
    requests: list[ReceivedRequest] = field(default_factory=list)

    def bodies(self, path: str = "chat/completions") -> list[dict]:
        return [request.body for request in self.requests if request.path.endswith(path)]


@contextmanager
def scripted_endpoint(script: Script) -> Iterator[ScriptedEndpoint]:
    """Serve `script` at a free port of 127.0.0.1 for both APIs, also streamed."""
    endpoint = ScriptedEndpoint()
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        endpoint.requests.append(ReceivedRequest(request.path, dict(request.headers), body))
        if request.path.endswith("/models"):
            return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
        if request.path.endswith("count_tokens"):
            return web.json_response({"input_tokens": 1})
        if not request.path.endswith(("/chat/completions", "/messages")):
            return web.json_response({"error": {"message": "no such route", "type": "x", "code": None}}, status=404)
        number = len(endpoint.requests) - 1
        is_chat = request.path.endswith("/chat/completions")
        try:
            message = {"role": "assistant", "content": None} | script(number, body)
        except Refusal as refusal:
            error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.code}
            return web.json_response({"type": "error", "error": error}, status=refusal.status)
        whole = _chat(number, message, body) if is_chat else _anthropic(number, message)
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in _chat_events(whole) if is_chat else _anthropic_events(whole):
            await response.write(event)
        return response

    async def serve() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(ANSWER_S)
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(ANSWER_S)
        loop.close()


def call(name: str, **arguments: object) -> dict:
    """Return a message that calls one tool."""
    return calls((name, arguments))


def calls(*pairs: tuple[str, dict]) -> dict:
    return {
        "tool_calls": [
            {"id": f"call_0_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(pairs)
        ]
    }


def _chat(number: int, message: dict, body: dict) -> dict:
    choices = [
        {
            "index": i,
            "message": message,
            "logprobs": None,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        for i in range(body.get("n") or 1)
    ]
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": choices,
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def _chat_events(whole: dict) -> Iterator[bytes]:
    base = whole | {"object": "chat.completion.chunk", "usage": None}
    message = whole["choices"][0]["message"]
    tools = [call | {"index": i} for i, call in enumerate(message.get("tool_calls") or [])]
    delta = message | ({"tool_calls": tools} if tools else {})
    for choice in (
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": whole["choices"][0]["finish_reason"]},
    ):
        yield b"data: " + json.dumps(base | {"choices": [choice]}).encode() + b"\n\n"
    yield b"data: " + json.dumps(base | {"choices": [], "usage": whole["usage"]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _anthropic(number: int, message: dict) -> dict:
    blocks = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for item in message.get("tool_calls") or []:
        function = item["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": item["id"], "name": function["name"], "input": arguments})
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": blocks,
        "stop_reason": "tool_use" if message.get("tool_calls") else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 5},
    }


def _anthropic_events(whole: dict) -> Iterator[bytes]:
    def event(kind: str, **fields: object) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()

    yield event("message_start", message=whole | {"content": [], "stop_reason": None})
    for i, block in enumerate(whole["content"]):
        empty, delta = {
            "text": lambda b: ({"type": "text", "text": ""}, {"type": "text_delta", "text": b["text"]}),
            "thinking": lambda b: (
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "thinking_delta", "thinking": b["thinking"]},
            ),
            "tool_use": lambda b: (
                b | {"input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(b["input"])},
            ),
        }[block["type"]](block)
        yield event("content_block_start", index=i, content_block=empty)
        yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=stop, usage={"output_tokens": 5})
    yield event("message_stop")

"""OpenAI's chat completions: requests, answers, streams and errors as its clients write and read
them; also turns in tokens, for `Endpoint.generate`."""

from collections.abc import Iterator
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from megatron_dapo.agents.model_requests import Body, Count, ModelRequest, Reply, Stops, StopText, read_body

PING = b": waiting\n\n"
_NEUTRAL: dict[str, tuple] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "functions": ([],),
    "repetition_penalty": (1,),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens"), (0,)),
    **dict.fromkeys(("continue_final_message", "ignore_eos"), (False,)),
    **dict.fromkeys(("audio", "web_search_options", "regex", "ebnf", "json_schema", "structural_tag"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "stop_token_ids"), ()),
}
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 500: "server_error"}


class _Function(BaseModel):
    name: str
    arguments: str = "{}"  # of a call


class _ChatTool(BaseModel):
    type: Literal["function"] = "function"
    function: _Function


class _ChatCall(_ChatTool):
    id: str


class _ChatPart(BaseModel):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ChatPart] | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return it with text as content, in a role that templates know."""
        fields = {"content": None, **self.model_dump(exclude_none=True)}
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text + part.refusal for part in self.content)
        return fields if self.role != "developer" else {**fields, "role": "system"}


class _ChatBody(Body):
    messages: list[_ChatMessage] = []
    ids: list[int] | None = None
    tools: list[_ChatTool] = []
    tool_choice: Literal["auto", "required", "none"] = "auto"
    max_completion_tokens: Count | None = None
    n: Count = 1
    stop: StopText | Stops = []
    stream_options: dict[str, Any] = {}
    logprobs: bool = False


def parse(fields: dict[str, Any]) -> ModelRequest:
    """Return the request of a body. Raises TurnRefused."""
    body = read_body(_ChatBody, fields, _NEUTRAL)
    return ModelRequest(
        model=body.model,
        messages=[message.plain() for message in body.messages],
        tools=fields["tools"] if body.tools and body.tool_choice != "none" else None,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        is_streamed=body.stream and body.ids is None,
        wants_usage=body.stream_options.get("include_usage") is True,
        wants_log_probs=body.logprobs,
        ids=body.ids,
    )


def body(reply: Reply) -> Any:
    """Return the answer that is not streamed; the first itself for a request in tokens."""
    first = reply.choices[0]
    if not first.message:
        return first.answer
    choices = [
        {**_end(reply, place), "message": {**choice.message, "content": choice.message["content"] or None}}
        for place, choice in enumerate(reply.choices)
    ]
    return {**_head(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


def events(reply: Reply, wants_usage: bool) -> Iterator[bytes]:
    """Yield the events of a streamed answer."""
    head = _head(reply, "chat.completion.chunk")
    for place, choice in enumerate(reply.choices):
        for delta in _deltas(choice.message):
            yield event({**head, "choices": [{"index": place, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{**_end(reply, place), "delta": {}}]})
    if wants_usage:
        yield event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def event(fields: dict[str, Any]) -> bytes:
    """Return one event of a stream; that of an `error_body` is the last."""
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def error_body(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    if calls := message.get("tool_calls"):
        yield {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.identity}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": reply.num_completion,
        "total_tokens": reply.num_prompt + reply.num_completion,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached},
    }


def _end(reply: Reply, place: int) -> dict[str, Any]:
    choice = reply.choices[place]
    tokens = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(choice.token_texts, choice.answer.log_probs, strict=False)
    ]
    log_probs = {"content": tokens, "refusal": None} if tokens else None
    return {"index": place, "logprobs": log_probs, "finish_reason": choice.finish_reason}

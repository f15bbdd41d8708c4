"""Anthropic's API against a gateway whose model is scripted; SGLang's own models of that API read the
answers."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

import httpx
import pydantic
import pytest

from tests.agent_gateway import CALL, END, LIMITS, NAME, Bench, bench, plain_http

pytestmark = pytest.mark.unit
ASK = {"role": "user", "content": "ask"}
TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("model") / "m", reasoning_parser="qwen3") as started:
        yield started


@pytest.fixture(scope="module")
def protocol() -> Iterator[ModuleType]:
    """SGLang's module, without the seconds of its imports: it needs one class without fields here."""
    file = distribution("sglang").locate_file("sglang/srt/entrypoints/anthropic/protocol.py")
    spec = importlib.util.spec_from_file_location("anthropic_protocol", str(file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    other = "sglang.srt.entrypoints.openai.protocol"
    stand_in = ModuleType(other)
    stand_in.PDRoutingFields = pydantic.BaseModel  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, other, stand_in)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


async def post(session: Any, fields: dict, route: str = "messages") -> httpx.Response:
    async with plain_http() as http:
        asked = {"model": NAME, "max_tokens": 500, "messages": [ASK]} | fields
        headers = {"X-Api-Key": session.endpoint.key, "anthropic-version": "2023-06-01"}
        url = session.endpoint.anthropic_url.partition("/t/")[0]  # the key is in the header alone
        return await http.post(f"{url}/v1/{route}", json=asked, headers=headers)


def events(text: str) -> list[dict]:
    """Return the data of a stream's events, each under its own name."""
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    rows = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {row['type']}" for row in rows]
    return rows


def assembled(rows: list[dict]) -> dict:
    """Return the message of a stream, as Anthropic's client puts it together."""
    message = rows[0]["message"]
    for row in rows[1:]:
        if row["type"] == "content_block_start":
            assert row["index"] == len(message["content"])
            message["content"].append(row["content_block"] | {"json": ""})
        elif row["type"] == "content_block_delta":
            block, delta = message["content"][row["index"]], row["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif row["type"] == "message_delta":
            message |= row["delta"]
            message["usage"] |= row["usage"]
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return message


TEXTS = (f"hello{END}", f"<think>hm</think>so {CALL}\n{CALL}{END}", f"a stop b{END}", "x" * 50, END, f"{CALL}{END}")
REASONS = ("end_turn", "tool_use", "stop_sequence", "max_tokens", "end_turn", "tool_use")


@pytest.mark.parametrize(("text", "reason"), list(zip(TEXTS, REASONS, strict=True)))
def test_an_answer_and_its_stream_are_the_apis(gateway: Bench, protocol: ModuleType, text: str, reason: str) -> None:
    asked = {"tools": TOOLS, "stop_sequences": ["stop"], "max_tokens": 45 if text[0] == "x" else 500}

    async def agent(session, model):
        answer = await post(session, asked)
        assert answer.status_code == 200
        message = answer.json()
        assert protocol.AnthropicMessagesResponse(**message).stop_reason == reason
        assert message["stop_sequence"] == ("stop" if reason == "stop_sequence" else None)
        streamed = await post(session, asked | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        rows = events(streamed.text)
        adapter = pydantic.TypeAdapter(protocol.AnthropicStreamEvent)
        kinds = [adapter.validate_python(row).type for row in rows]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        other = assembled(rows)
        for block in message["content"] + other["content"]:
            if block["type"] == "tool_use":
                block["id"] = block["id"].split("_")[-1]  # behind the node's number
        assert other["content"] == message["content"]
        assert {**other, "id": 0, "content": 0, "usage": 0} == {**message, "id": 0, "content": 0, "usage": 0}
        assert other["usage"]["output_tokens"] == message["usage"]["output_tokens"]

    session, _ = gateway.play(agent, text)
    assert session.notes.delivered == {0, 1}


def test_a_conversation_with_thoughts_calls_and_results_is_one_branch(gateway: Bench) -> None:
    async def agent(session, model):
        first = (await post(session, {"tools": TOOLS, "system": "be"})).json()
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        calls = [block for block in first["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "6"},
            {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": [{"type": "text", "text": "7"}]},
            {"type": "text", "text": "and?"},
        ]
        messages = [ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        asked = {"tools": TOOLS, "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]}
        second = (await post(session, {**asked, "messages": messages})).json()
        usage = second["usage"]
        assert usage["cache_read_input_tokens"] == len(model.prompts[0])
        assert usage["input_tokens"] == len(model.turns[1].suffix)
        kept = [block for block in first["content"] if block["type"] != "thinking"]
        again = [ASK, {"role": "assistant", "content": kept}, *messages[2:]]
        await post(session, {**asked, "messages": again})

    _, model = gateway.play(agent, f"<think>hm</think>so {CALL}\n{CALL}{END}", f"13{END}")
    assert [turn.parent for turn in model.turns] == [None, 0, 0]
    text = model.text(model.turns[1])
    assert "<|im_start|>system\nbe<" in text
    assert text.endswith(
        f"tool\n6{END}\n<|im_start|>tool\n7{END}\n<|im_start|>user\nand?{END}\n<|im_start|>assistant\n"
    )


def test_a_message_of_hidden_thoughts_alone_is_one(gateway: Bench) -> None:
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}

    async def agent(session, model):
        assert (await post(session, {"messages": [ASK, hidden, ASK]})).status_code == 200

    _, model = gateway.play(agent)
    assert f"<|im_start|>assistant\n{END}\n<|im_start|>user" in model.text(model.turns[0])


def test_tokens_are_counted_without_a_turn(gateway: Bench) -> None:
    async def agent(session, model):
        fields = {"model": NAME, "messages": [ASK], "tools": TOOLS}
        counted = await post(session, fields, "messages/count_tokens")
        answer = await post(session, fields)
        assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}

    _, model = gateway.play(agent)
    assert len(model.turns) == 1


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"model": "claude"}, 404, "not_found_error", "model"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [ASK, {"role": "assistant", "content": "I"}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error", "messages"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "output_config"),
        ({"mcp_servers": [{"url": "http://x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, 400, "invalid_request_error", None),
    ],
)
def test_a_bad_request_is_refused_by_name(
    gateway: Bench, protocol: ModuleType, fields: dict, status: int, kind: str, param: str | None
) -> None:
    async def agent(session, model):
        answer = await post(session, fields)
        assert answer.status_code == status
        error = protocol.AnthropicErrorResponse(**answer.json()).error
        assert error.type == kind
        assert answer.json()["error"]["param"] == param
        if param is None:
            assert error.message.startswith("prompt is too long: ")  # harnesses look for these words

    session, model = gateway.play(agent)
    assert model.turns == []
    assert session.notes.counts["refused"] == 1


def test_a_limit_is_an_error_that_no_client_repeats(gateway: Bench) -> None:
    async def agent(session, model):
        assert (await post(session, {})).status_code == 200
        answer = await post(session, {})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")

    gateway.play(agent, limits=replace(LIMITS, max_turns=1))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "tools": TOOLS},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "metadata": {"user_id": "me"}, "betas": ["x"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"output_config": {"effort": "high"}, "service_tier": "auto", "container": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(gateway: Bench, fields: dict) -> None:
    async def agent(session, model):
        assert (await post(session, fields)).status_code == 200

    gateway.play(agent)


def test_own_sampling_parameters_are_counted_and_ignored(gateway: Bench) -> None:
    async def agent(session, model):
        assert (await post(session, {"temperature": 0.0, "top_k": 3})).status_code == 200

    session, _ = gateway.play(agent)
    assert session.notes.counts["overruled"] == 1

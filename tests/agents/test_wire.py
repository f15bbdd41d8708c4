"""The requests that each client really sends: what a gateway must bear, and may rely on."""

import pytest

from tests.agents.environments import EXAMPLES, PROGRAMS, run_program, task_of
from tests.agents.scripted_endpoint import Refusal, ScriptedEndpoint, call, calls, scripted_endpoint

pytestmark = pytest.mark.e2e

THOUGHT = {"reasoning_content": "hmm"}


def play(name, program, script, folder, **extra) -> tuple[ScriptedEndpoint, dict]:
    with scripted_endpoint(script) as endpoint:
        result = run_program(name, program, endpoint.url, task_of("12*34?", "408", **extra), folder)
    return endpoint, result


def then_answer(number: int, body: dict) -> dict:
    """Call the first tool twice, then answer."""
    asked = "tool" in [message["role"] for message in body["messages"]] or len(body["messages"]) > 2
    if asked:
        return {"content": "408"} | THOUGHT
    (tool, *_) = body["tools"]
    name = tool.get("function", tool)["name"]  # in OpenAI's form, or Anthropic's
    return calls((name, {"expression": "12*34"}), (name, {"expression": "1+1"})) | THOUGHT


CLIENTS = {
    "openai": PROGRAMS / "openai_chat.py",
    "anthropic": PROGRAMS / "anthropic_chat.py",
    "openai_agents": EXAMPLES / "openai_agents_calculator.py",
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_key_and_the_number_of_tries_come_with_each_request(name, tmp_path):
    endpoint, _ = play(name, CLIENTS[name], then_answer, tmp_path, turns=2)
    for request in endpoint.requests:
        headers = {key.lower(): value for key, value in request.headers.items()}
        assert headers["authorization"] == "Bearer KEY" and headers["x-stainless-retry-count"] == "0"
        assert request.path.startswith("/t/KEY/v1/")


@pytest.mark.parametrize("mode", ["tools", "stream"])
def test_openai_echoes_calls_and_thoughts(mode, tmp_path):
    endpoint, _ = play("openai", CLIENTS["openai"], then_answer, tmp_path, mode=mode, turns=2)
    first, second = endpoint.bodies()
    assert first.get("stream", False) == (mode == "stream") and "stream_options" not in first
    echo = second["messages"][1]
    assert [call["id"] for call in echo["tool_calls"]] == ["call_0_0", "call_0_1"]
    assert echo["reasoning_content"] == "hmm" and echo.get("content") is None
    assert ("index" in echo["tool_calls"][0]) == (mode == "stream")


@pytest.mark.parametrize("mode", ["tools", "stream"])
def test_anthropic_echoes_blocks_of_thinking_and_tools(mode, tmp_path):
    endpoint, _ = play("anthropic", CLIENTS["anthropic"], then_answer, tmp_path, mode=mode, turns=2)
    (counted,) = endpoint.bodies("count_tokens")
    first, second = endpoint.bodies("messages")
    assert counted == {key: value for key, value in first.items() if key not in ("max_tokens", "stream")}
    _, echo, results = second["messages"]
    assert [block["type"] for block in echo["content"]] == ["thinking", "tool_use", "tool_use"]
    assert [block["type"] for block in results["content"]] == ["tool_result", "tool_result"]


def test_openai_agents_drops_thoughts_and_runs_all_calls(tmp_path):
    endpoint, result = play("openai_agents", CLIENTS["openai_agents"], then_answer, tmp_path)
    assert result["correct"]
    _, echo, *results = endpoint.bodies()[1]["messages"]
    assert "reasoning_content" not in echo and echo["content"] is None
    assert [message["content"] for message in results] == ["408", "2"]


def test_smolagents_rewrites_turns_as_text(tmp_path):
    def code(number: int, body: dict) -> dict:
        return {"content": ["<code>\nx = calculator('12*34')\n", "<code>\nfinal_answer('408')\n"][number]}

    endpoint, result = play("smolagents", PROGRAMS / "smolagents_code.py", code, tmp_path)
    first, second = endpoint.bodies()
    assert result["reward"] == 1.0
    assert first["stop"] == ["Observation:", "Calling tools:", "</code>"] and "tools" not in first
    (part,) = second["messages"][2]["content"]
    assert part["text"].startswith("<code>\nx = calculator('12*34')\n</code>\nCalling tools:\n")


def test_smolagents_forces_tools_and_shows_calls_as_text(tmp_path):
    def tools(number: int, body: dict) -> dict:
        return [call("calculator", expression="12*34"), call("final_answer", answer="408")][number]

    endpoint, result = play("smolagents", PROGRAMS / "smolagents_code.py", tools, tmp_path, mode="tools")
    first, second = endpoint.bodies()
    assert result["reward"] == 1.0 and first["tool_choice"] == "required"
    assert all("tool_calls" not in message and message["role"] != "tool" for message in second["messages"])


PLAYER = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
GUESS = {"env": {"taskset": {"id": "guess_taskset"}, "player": PLAYER}, "idx": 2, "sampling": {"max_tokens": 12}}


def test_verifiers_relays_each_turn_of_an_environment_as_a_stream(tmp_path):
    endpoint, result = play(
        "verifiers",
        EXAMPLES / "verifiers_episode.py",
        lambda number, body: {"content": str(number)},
        tmp_path,
        **GUESS,
    )
    assert result == {"reward": 1.0, "error": None}
    assert [body["max_tokens"] for body in endpoint.bodies()] == [12] * 3
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in endpoint.bodies())
    said = [message["content"] for message in endpoint.bodies()[2]["messages"][1:]]
    assert said == ["0", "another number", "1", "another number"]


ALL = CLIENTS | {
    "smolagents": PROGRAMS / "smolagents_code.py",
    "mini_swe_agent": EXAMPLES / "mini_swe_agent_repair.py",
    "verifiers": EXAMPLES / "verifiers_episode.py",
}
TOO_LONG = "This model's maximum context length is 2700 tokens. However, you requested 3000 tokens."


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [(403, "max_turns", "no further turn"), (400, "context_length_exceeded", TOO_LONG)],
    ids=["limit", "room"],
)
@pytest.mark.parametrize("name", ALL)
def test_no_client_tries_again_where_a_trajectory_has_ended(name, status, code, message, tmp_path):
    def refuse(number: int, body: dict) -> dict:
        raise Refusal(status, code, message)

    with scripted_endpoint(refuse) as endpoint:
        task = task_of("12*34?", "408", mode="tools", **GUESS)
        run_program(name, ALL[name], endpoint.url, task, tmp_path, may_fail=True)
    turns = [request for request in endpoint.requests if request.path.endswith(("/completions", "/messages"))]
    assert len(turns) == 1

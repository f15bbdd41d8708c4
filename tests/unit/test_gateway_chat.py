"""OpenAI's client against a gateway whose model is scripted."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import openai
import pytest

from tests.agent_gateway import CALL, END, LIMITS, NAME, TOOLS, Bench, bench, openai_client, plain_http, refused

pytestmark = pytest.mark.unit
ASK = [{"role": "user", "content": "ask"}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("model") / "m", retry_wait_s=0.2) as started:
        yield started


def test_a_conversation_goes_on_behind_its_exact_tokens(gateway: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        answer = await chat.create(model=NAME, messages=ASK)
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(model.turns[0].suffix)
        assert answer.usage.completion_tokens == 6
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
        messages = [*ASK, answer.choices[0].message, {"role": "user", "content": "more"}]
        answer = await chat.create(model=NAME, messages=messages)
        assert answer.usage.prompt_tokens_details.cached_tokens == len(model.prompts[0])

    session, model = gateway.play(agent)
    assert [turn.parent for turn in model.turns] == [None, 0]
    assert [turn.request for turn in model.turns] == [0, 1]
    assert model.text(model.turns[1]) == (
        f"<|im_start|>user\nask{END}\n<|im_start|>assistant\nhello{END}\n<|im_start|>user\nmore{END}\n"
        "<|im_start|>assistant\n"
    )
    assert session.notes.delivered == {0, 1}
    assert session.notes.refusal is None


def test_calls_of_tools_and_their_results_are_one_branch(gateway: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        answer = await chat.create(model=NAME, messages=ASK, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "so "
        first, second = choice.message.tool_calls
        assert (first.id, second.id) == ("call_0_0", "call_0_1")
        assert json.loads(second.function.arguments) == {"a": 1, "b": [2, 3]}
        results = [{"role": "tool", "tool_call_id": call.id, "content": "6"} for call in (first, second)]
        await chat.create(model=NAME, messages=[*ASK, choice.message, *results], tools=TOOLS)

    _, model = gateway.play(agent, f"so {CALL}\n{CALL}{END}", f"6{END}")
    assert [turn.parent for turn in model.turns] == [None, 0]
    assert model.text(model.turns[1]).count("tool\n6") == 2


@pytest.mark.parametrize("text", [f"hello{END}", f"so {CALL}{END}", f"a stop b{END}", "x" * 50, END])
def test_a_stream_says_the_same_as_an_answer_at_once(gateway: Bench, text: str) -> None:
    asked = {"model": NAME, "messages": ASK, "tools": TOOLS, "max_tokens": 90, "stop": "stop"}

    async def agent(session, model):
        chat = openai_client(session).chat.completions
        whole = await chat.create(**asked)
        async with openai_client(session).chat.completions.stream(
            **asked, stream_options={"include_usage": True}
        ) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
        (one,), (other,) = whole.choices, streamed.choices
        assert other.finish_reason == one.finish_reason
        assert (other.message.content or None) == one.message.content
        assert [call.function.arguments for call in other.message.tool_calls or ()] == [
            call.function.arguments for call in one.message.tool_calls or ()
        ]
        assert streamed.usage.completion_tokens == whole.usage.completion_tokens

    session, _ = gateway.play(agent, text)
    assert session.notes.delivered == {0, 1}


def test_several_choices_are_nodes_of_one_turn(gateway: Bench) -> None:
    async def agent(session, model):
        answer = await openai_client(session).chat.completions.create(model=NAME, messages=ASK, n=3)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        stream = await openai_client(session).chat.completions.create(model=NAME, messages=ASK, n=2, stream=True)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {0: "d", 1: "d"}

    session, model = gateway.play(agent, *(f"{letter}{END}" for letter in "abcd"))
    assert [turn.num_answers for turn in model.turns] == [3, 2]
    assert session.notes.delivered == {0, 1, 2, 3, 4}


def test_log_probs_are_those_of_the_tokens(gateway: Bench) -> None:
    async def agent(session, model):
        answer = await openai_client(session).chat.completions.create(model=NAME, messages=ASK, logprobs=True)
        tokens = answer.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == f"hello{END}"
        assert [token.logprob for token in tokens] == [-place / 64 for place in range(6)]

    gateway.play(agent)


def test_a_stop_text_ends_what_the_client_sees(gateway: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        answer = await chat.create(model=NAME, messages=ASK, stop=["Observation:", "nothing"])
        assert answer.choices[0].message.content == "go "
        assert answer.usage.completion_tokens == len("go Observation:")
        messages = [*ASK, answer.choices[0].message, {"role": "user", "content": "more"}]
        await chat.create(model=NAME, messages=messages)

    _, model = gateway.play(agent, "go Observation:", f"ok{END}")
    assert model.turns[0].stop == ("Observation:", "nothing")
    assert model.turns[1].parent == 0


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "gpt-4o"}, 404, "model", "model_not_found"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages", "invalid_value"),
        ({"messages": [*ASK, {"role": "assistant", "content": "I"}]}, 400, "messages", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            400,
            "messages",
            "invalid_value",
        ),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, 400, "tool_choice", "invalid_value"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "unsupported_parameter"),
        ({"frequency_penalty": -1}, 400, "frequency_penalty", "unsupported_parameter"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "unsupported_parameter"),
        ({"n": 5}, 400, "n", "invalid_value"),
        ({"n": True}, 400, "n", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"stop": [""]}, 400, "stop", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, 400, None, "context_length_exceeded"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_not_repeated(
    gateway: Bench, fields: dict, status: int, param: str | None, code: str
) -> None:
    async def agent(session, model):
        sent: list[httpx.Request] = []
        options = plain_http(event_hooks={"request": [_noting(sent)]})
        asked = {"model": NAME, "messages": ASK} | fields
        chat = openai_client(session, http_client=options).chat.completions
        error = await refused(chat.create(**asked), openai.APIStatusError)
        assert (error.status_code, error.param, error.code) == (status, param, code)
        assert len(sent) == 1

    session, model = gateway.play(agent)
    assert model.turns == []
    assert session.notes.counts["refused"] == 1
    assert session.notes.refusal == code


def _noting(sent: list):
    async def note(request: httpx.Request) -> None:
        sent.append(request)

    return note


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0},
        {"tool_choice": "required", "tools": TOOLS, "parallel_tool_calls": True},
        {"seed": 3, "user": "me", "store": False, "metadata": {}, "n": None, "stop": None, "top_logprobs": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(gateway: Bench, fields: dict) -> None:
    async def agent(session, model):
        await openai_client(session).chat.completions.create(model=NAME, messages=ASK, **fields)

    session, _ = gateway.play(agent)
    assert "overruled" not in session.notes.counts


def test_tools_are_not_shown_with_tool_choice_none(gateway: Bench) -> None:
    async def agent(session, model):
        answer = await openai_client(session).chat.completions.create(
            model=NAME, messages=ASK, tools=TOOLS, tool_choice="none"
        )
        assert answer.choices[0].message.content == CALL

    _, model = gateway.play(agent, f"{CALL}{END}")
    assert "parameters" not in model.text(model.turns[0])


def test_a_call_that_no_parser_understands_stays_text(gateway: Bench) -> None:
    text = "<tool_call>\n{no json\n</tool_call>"

    async def agent(session, model):
        answer = await openai_client(session).chat.completions.create(model=NAME, messages=ASK, tools=TOOLS)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "stop"

    session, _ = gateway.play(agent, f"{text}{END}")
    assert session.notes.counts["ill_formed"] == 1


def test_own_sampling_parameters_are_counted_and_ignored(gateway: Bench) -> None:
    async def agent(session, model):
        await openai_client(session).chat.completions.create(model=NAME, messages=ASK, temperature=0.1, top_p=0.5)

    session, _ = gateway.play(agent)
    assert session.notes.counts["overruled"] == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_has_no_more_tokens_than_asked_for(gateway: Bench, name: str) -> None:
    async def agent(session, model):
        answer = await openai_client(session).chat.completions.create(model=NAME, messages=ASK, **{name: 4})
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "hell"

    _, model = gateway.play(agent)
    assert model.turns[0].max_new_tokens == 4


def test_a_limit_of_turns_is_told_to_the_controller_at_once(gateway: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        await chat.create(model=NAME, messages=ASK)
        error = await refused(chat.create(model=NAME, messages=ASK), openai.PermissionDeniedError)
        assert error.code == "max_turns"
        assert await session.limit == "max_turns"

    session, _ = gateway.play(agent, limits=replace(LIMITS, max_turns=1))
    assert session.notes.refusal == "max_turns"


def test_a_refusal_of_the_controller_reaches_the_client(gateway: Bench) -> None:
    from megatron_dapo.agents.turns import TurnRefused

    async def agent(session, model):
        chat = openai_client(session).chat.completions
        error = await refused(chat.create(model=NAME, messages=ASK), openai.PermissionDeniedError)
        assert error.code == "deadline"

    gateway.play(agent, TurnRefused(403, "deadline", "Time is up."))


def test_the_model_is_listed(gateway: Bench) -> None:
    async def agent(session, model):
        listed = await openai_client(session).models.list()
        assert [model.id for model in listed.data] == [NAME]
        assert (await openai_client(session).models.retrieve(NAME)).id == NAME
        error = await refused(openai_client(session).models.retrieve("other"), openai.NotFoundError)
        assert error.code == "model_not_found"

    gateway.play(agent)


def test_the_responses_api_does_not_exist(gateway: Bench) -> None:
    async def agent(session, model):
        error = await refused(openai_client(session).responses.create(model=NAME, input="x"), openai.NotFoundError)
        assert error.code == "not_found"

    gateway.play(agent)


def test_a_retry_joins_its_request_and_the_same_body_alone_does_not(gateway: Bench) -> None:
    async def agent(session, model):
        impatient = openai_client(session, timeout=0.1, max_retries=0).chat.completions
        await refused(impatient.create(model=NAME, messages=ASK), openai.APITimeoutError)
        patient = openai_client(session).chat.completions
        again = asyncio.ensure_future(
            patient.create(model=NAME, messages=ASK, extra_headers={"x-stainless-retry-count": "1"})
        )
        while session.notes is None or not model.num_under_way:
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)  # longer than a request without a client goes on
        model.gate.set()
        answer = await again
        assert len(model.turns) == 1
        repeated = await patient.create(model=NAME, messages=ASK, extra_headers={"x-stainless-retry-count": "2"})
        assert repeated.id == answer.id
        other = await patient.create(model=NAME, messages=ASK)
        assert other.id != answer.id

    session, model = gateway.play(agent, gate=True)
    assert len(model.turns) == 2
    assert session.notes.delivered == {0, 1}
    assert session.notes.counts["retries"] == 2


def test_a_retry_joins_the_last_of_equal_requests(gateway: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        model.gate.set()
        first = await chat.create(model=NAME, messages=ASK)
        model.gate.clear()
        second = asyncio.ensure_future(chat.create(model=NAME, messages=ASK))
        while len(model.turns) < 2:
            await asyncio.sleep(0)
        await refused(chat.create(model=NAME, messages=[{"role": "user", "content": "x" * 2100}]), openai.APIError)
        headers = {"x-stainless-retry-count": "1"}
        again = asyncio.ensure_future(chat.create(model=NAME, messages=ASK, extra_headers=headers))
        done, _ = await asyncio.wait({again}, timeout=0.1)
        assert not done
        model.gate.set()
        assert (await again).id == (await second).id != first.id

    _, model = gateway.play(agent, gate=True)
    assert len(model.turns) == 2


def test_a_request_without_its_client_is_cancelled(gateway: Bench) -> None:
    async def agent(session, model):
        impatient = openai_client(session, timeout=0.1, max_retries=0).chat.completions
        await refused(impatient.create(model=NAME, messages=ASK), openai.APITimeoutError)
        await model.cancelled.wait()

    session, model = gateway.play(agent, gate=True)
    assert session.notes.delivered == set()


def test_requests_under_way_end_with_the_session(gateway: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        asking = asyncio.ensure_future(refused(chat.create(model=NAME, messages=ASK), openai.PermissionDeniedError))
        while not model.turns:
            await asyncio.sleep(0)
        await session.close_requests()
        assert (await asking).code == "key_closed"
        assert model.cancelled.is_set()
        error = await refused(chat.create(model=NAME, messages=ASK), openai.PermissionDeniedError)
        assert error.code == "key_closed"

    session, _ = gateway.play(agent, gate=True)
    assert session.notes.refusal is None


def test_turns_in_tokens(gateway: Bench) -> None:
    async def agent(session, model):
        first = await session.endpoint.generate([1, 2, 3])
        assert first.finish_reason == "stop"
        second = await session.endpoint.generate([1, 2, 3, *first.tokens, 7], max_tokens=2)
        assert len(second.tokens) == len(second.log_probs) == 2

    session, model = gateway.play(agent)
    assert [turn.parent for turn in model.turns] == [None, 0]
    assert list(model.turns[1].suffix) == [7]
    assert session.notes.delivered == {0, 1}


def test_a_reward_is_posted_with_its_own_key(gateway: Bench) -> None:
    async def agent(session, model):
        endpoint = session.endpoint
        async with plain_http() as http:
            for key, status in ((endpoint.key, 401), (endpoint.reward_key, 200)):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await http.post(endpoint.reward_url, json={"reward": 0.5, "correct": True}, headers=headers)
                assert answer.status_code == status
            answer = await http.post(endpoint.reward_url, json={"reward": "high"}, headers=headers)
            assert answer.status_code == 400

    session, _ = gateway.play(agent)
    assert (session.posted.reward, session.posted.correct) == (0.5, True)

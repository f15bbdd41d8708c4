"""Bounds of a gateway: keys, sizes, floods, silence."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import openai
import psutil
import pytest

from megatron_dapo.agents.gateway_session import MAX_IN_FLIGHT, MAX_WAITING
from tests.agent_gateway import END, LIMITS, NAME, Bench, ScriptedModel, bench, openai_client, plain_http, refused

pytestmark = pytest.mark.unit
ASK = {"model": NAME, "messages": [{"role": "user", "content": "ask"}]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("model") / "m", max_request_mb=1) as started:
        yield started


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("model") / "m", keep_alive_s=0.05, silence_s=0.3) as started:
        yield started


async def post(url: str, key: str = "", **options: Any) -> httpx.Response:
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | options.pop("headers", {})
    async with plain_http() as http:
        return await http.post(url, headers=headers, **options)


async def raw(session: Any, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over the Unix socket; `head` is its further header lines."""
    reader, writer = await asyncio.open_unix_connection(session.endpoint.socket)
    lines = f"POST /t/{session.endpoint.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n"
    writer.write(lines.encode() + body)
    return reader, writer


async def raw_ask(session: Any, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps(ASK | fields).encode()
    return await raw(session, f"Content-Length: {len(body)}\r\nConnection: close", body)


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


def process_of(session: Any) -> psutil.Process:
    """Return the gateway that listens at a trajectory's socket."""
    path = session.endpoint.socket
    children = psutil.Process().children()
    return next(child for child in children if any(each.laddr == path for each in child.net_connections("unix")))


def test_a_key_reaches_its_own_trajectory_only(gateway: Bench) -> None:
    async def agent(session, model):
        url = session.endpoint.base_url.partition("/t/")[0]
        own, other = session.endpoint.key, session.endpoint.reward_key
        for key in ("", "nobody", other, own[:-1], own + "x", "é"):
            answer = await post(f"{url}/v1/chat/completions", headers={"X-Api-Key": key.encode()}, json=ASK)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            answer = await post(f"{url}/t/{key or 'x'}/v1/messages", key=own, json=ASK)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert (await post(f"{url}/v1/chat/completions", key=own, json=ASK)).status_code == 200
        async with gateway.gateways.session(LIMITS, model.answer, model.parse) as second:
            assert (await post(f"{second.endpoint.base_url}/chat/completions", json=ASK)).status_code == 200
        answer = await post(f"{second.endpoint.base_url}/chat/completions", key=own, json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "key_closed")
        assert second.notes.delivered == {1}

    session, _ = gateway.play(agent)
    assert session.notes.delivered == {0}
    assert "refused" not in session.notes.counts


def test_100_mb_are_refused_by_their_head(gateway: Bench) -> None:
    async def agent(session, model):
        reader, writer = await raw(session, "Content-Length: 100000000")
        assert await status(reader) == 413
        writer.close()

    session, _ = gateway.play(agent)
    assert session.notes.refusal == "request_too_large"


def test_a_body_without_a_length_is_counted(gateway: Bench) -> None:
    async def parts():
        for _ in range(40):
            yield b" " * 65536

    async def agent(session, model):
        url = f"{session.endpoint.base_url}/chat/completions"
        assert (await post(url, content=parts())).status_code == 413
        bomb = gzip.compress(b" " * (16 << 20))
        assert (await post(url, content=bomb, headers={"Content-Encoding": "gzip"})).status_code in (400, 413)

    gateway.play(agent)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"messages": {"role": "user"}}',
        b'{"messages": ["text"]}',
        b'{"max_tokens": 1e999}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "policy", "messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"model": "policy", "messages": [{"role": ["user"], "content": "a"}]}',
        b'{"model": "policy", "messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}',
        b'{"model": "policy", "stream_options": 3, "messages": []}',
    ],
)
def test_any_other_body_is_a_400(gateway: Bench, body: bytes) -> None:
    async def agent(session, model):
        for route in ("chat/completions", "messages", "tokens", "messages/count_tokens"):
            answer = await post(f"{session.endpoint.base_url}/{route}", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]
        answer = await post(session.endpoint.reward_url, key=session.endpoint.reward_key, content=body)
        assert answer.status_code == 400

    _, model = gateway.play(agent)
    assert model.turns == []


def test_tokens_that_are_none_are_refused(gateway: Bench) -> None:
    async def agent(session, model):
        for ids in ([], [-1], [2**40], [1.5], ["1"], [True], [10**6], {"a": 1}):
            answer = await post(f"{session.endpoint.base_url}/tokens", json={"model": NAME, "ids": ids})
            assert answer.status_code == 400

    gateway.play(agent)


def test_eight_requests_of_a_key_are_under_way_and_the_rest_waits(gateway: Bench) -> None:
    async def agent(session, model):
        url = f"{session.endpoint.base_url}/chat/completions"
        asking = [asyncio.ensure_future(post(url, json=ASK)) for _ in range(40)]
        while len(model.turns) < MAX_IN_FLIGHT:
            await asyncio.sleep(0)
        model.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 40

    session, model = gateway.play(agent, gate=True)
    assert model.most_under_way == MAX_IN_FLIGHT
    assert session.notes.delivered == set(range(40))


def test_a_flood_of_one_key_does_not_stop_another(gateway: Bench) -> None:
    async def agent(session, model):
        flood = [await raw_ask(session) for _ in range(MAX_WAITING + 2 * MAX_IN_FLIGHT)]
        firsts = [asyncio.ensure_future(status(reader)) for reader, _ in flood]
        done, _ = await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)
        assert {first.result() for first in done} == {403}  # of those beyond the bound
        async with gateway.gateways.session(LIMITS, free.answer, free.parse) as other:
            assert (await post(f"{other.endpoint.base_url}/chat/completions", json=ASK)).status_code == 200
        await session.close_requests()
        assert {await first for first in firsts} == {403}
        for _, writer in flood:
            writer.close()

    free = ScriptedModel(gateway.folder)
    _, model = gateway.play(agent, gate=True)
    assert model.most_under_way == MAX_IN_FLIGHT


def test_a_megabyte_of_text_keeps_no_other_trajectory_waiting(gateway: Bench) -> None:
    long = ASK | {"messages": [{"role": "user", "content": "words " * 160_000}]}

    async def agent(session, model):
        large = asyncio.ensure_future(post(f"{session.endpoint.base_url}/chat/completions", json=long))
        async with asyncio.timeout(20):
            while not large.done():  # a whole trajectory's opening and end, again and again
                async with gateway.gateways.session(LIMITS, model.answer, model.parse):
                    opened.append(large.done())
        assert (await large).json()["error"]["code"] == "context_length_exceeded"
        too_many = ASK | {"messages": [{"role": "user", "content": ""}] * 30_000}
        answer = await post(f"{session.endpoint.base_url}/chat/completions", json=too_many)
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    opened: list[bool] = []
    gateway.play(agent, limits=replace(LIMITS, max_prompt_tokens=20_000))
    assert opened.count(False) > 20


def test_trajectories_that_begin_disturb_no_rendering(gateway: Bench) -> None:
    many = ASK | {"messages": [{"role": "user", "content": "a"}] * 1000}

    async def agent(session, model):
        large = asyncio.ensure_future(post(f"{session.endpoint.base_url}/chat/completions", json=many))
        async with asyncio.timeout(20):
            while not large.done():
                async with gateway.gateways.session(LIMITS, model.answer, model.parse):
                    pass
        assert (await large).status_code == 200

    gateway.play(agent, limits=replace(LIMITS, max_prompt_tokens=50_000))


def test_disconnects_leave_a_bounded_number_of_turns(gateway: Bench) -> None:
    async def agent(session, model):
        for place in range(60):
            _, writer = await raw_ask(session)
            while len(model.turns) <= place:
                await asyncio.sleep(0)
            writer.close()

    _, model = gateway.play(agent, gate=True)
    assert model.most_under_way <= 2 * MAX_IN_FLIGHT + 1


def test_a_thousand_open_keys_are_cheap(gateway: Bench) -> None:
    model = ScriptedModel(gateway.folder)

    async def opened() -> None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(gateway.gateways.session(LIMITS, model.answer, model.parse))
            process = process_of(session)
            before = process.memory_info().rss
            sessions = [
                await stack.enter_async_context(gateway.gateways.session(LIMITS, model.answer, model.parse))
                for _ in range(1000)
            ]
            assert process.memory_info().rss - before < 30 << 20
            for session in (sessions[0], sessions[999]):
                assert (await post(f"{session.endpoint.base_url}/chat/completions", json=ASK)).status_code == 200
        assert len({session.endpoint.key for session in sessions}) == 1000

    gateway.runner.run(opened())


def test_silent_connections_are_closed(lively: Bench) -> None:
    async def agent(session, model):
        reader, writer = await asyncio.open_unix_connection(session.endpoint.socket)
        assert await reader.read() == b""
        writer.close()
        reader, writer = await raw(session, "Content-Length: 1000", b"{")
        assert await status(reader) == 400
        writer.close()

    lively.play(agent)


def test_a_patient_client_sees_signs_of_life(lively: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session).chat.completions
        asking = asyncio.ensure_future(chat.create(**ASK))
        stream = await chat.create(**ASK, stream=True)  # its head comes with the first sign
        messages = asyncio.ensure_future(post(f"{session.endpoint.base_url}/messages", json=ASK | {"stream": True}))
        reader, writer = await raw_ask(session)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for _ in range(2):
            assert await reader.readuntil(b"\r\n \r\n") == b"1\r\n \r\n"  # chunks of one space
        model.gate.set()
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        assert (await asking).choices[0].message.content == "hello"
        text = (await messages).text
        assert text.startswith('event: ping\ndata: {"type":"ping"}\n\n') and "hello" in text
        await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    session, _ = lively.play(agent, gate=True)
    assert session.notes.delivered == {0, 1, 2, 3}


def test_an_error_behind_signs_of_life_reaches_the_client(lively: Bench) -> None:
    async def agent(session, model):
        chat = openai_client(session, max_retries=1).chat.completions
        asking = asyncio.ensure_future(refused(chat.create(**ASK), openai.PermissionDeniedError))
        while not model.turns:
            await asyncio.sleep(0)
        stream = await chat.create(**ASK, stream=True)  # its first sign came behind the other's
        await session.close_requests()

        async def read() -> None:
            async for _ in stream:
                pass

        assert "has ended" in str(await refused(read(), openai.APIError))
        assert (await asking).code == "key_closed"

    lively.play(agent, gate=True)


def test_an_answer_that_was_not_read_to_its_end_is_not_delivered(gateway: Bench) -> None:
    async def agent(session, model):
        reader, writer = await raw_ask(session, logprobs=True)
        assert await status(reader) == 200
        writer.transport.abort()
        reader, writer = await raw_ask(session)
        await reader.read()
        writer.close()

    # a megabyte is more than a socket takes that nobody reads
    limits = replace(LIMITS, max_response_tokens=30_000)
    session, model = gateway.play(agent, "x" * 20_000, f"hello{END}", limits=limits)
    assert model.num_nodes == 2
    assert session.notes.delivered == {1}


def test_an_error_of_the_controller_is_a_500(gateway: Bench) -> None:
    async def agent(session, model):
        answer = await post(f"{session.endpoint.base_url}/chat/completions", json=ASK)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text

    session, _ = gateway.play(agent, ValueError("a secret of the controller"))
    assert session.notes.delivered == set()


def test_requests_with_a_closed_key_leave_nothing_behind(lively: Bench) -> None:
    async def agent(session, model):
        process = process_of(session)
        async with lively.gateways.session(LIMITS, model.answer, model.parse) as other:
            url = f"{other.endpoint.base_url}/chat/completions"
        sizes = []
        async with plain_http() as http:
            for num in (100, 400):
                for _ in range(num):
                    assert (await http.post(url, json=ASK)).status_code == 403
                sizes.append(process.memory_info().rss)
        assert sizes[1] - sizes[0] < 1 << 20

    lively.play(agent)


def test_only_the_last_answers_are_kept_for_retries(lively: Bench) -> None:
    async def agent(session, model):
        process = process_of(session)
        sizes = []
        async with plain_http() as http:
            for number in range(32):
                asked = ASK | {"messages": [{"role": "user", "content": f"ask {number}"}]}
                answer = await http.post(f"{session.endpoint.base_url}/chat/completions", json=asked)
                assert answer.status_code == 200
                sizes.append(process.memory_info().rss)
        # tokens and log-probs of an answer take 32 bytes a token and more, its node 4
        assert sizes[-1] - sizes[MAX_IN_FLIGHT] < (len(sizes) - MAX_IN_FLIGHT) * 16_000 * 16

    lively.play(agent, "x" * 16_000 + END, limits=replace(LIMITS, max_response_tokens=20_000, max_branches=100))


def test_the_last_turns_refusal_is_not_that_of_another_request(gateway: Bench) -> None:
    async def agent(session, model):
        endpoint = session.endpoint
        assert (await post(f"{endpoint.base_url}/chat/completions", json=ASK)).status_code == 200
        assert (await post(f"{endpoint.base_url}/chat/completions", json=ASK)).status_code == 403
        assert (await post(endpoint.reward_url, key=endpoint.reward_key, json={"reward": "high"})).status_code == 400
        assert (await post(f"{endpoint.base_url}/responses", json=ASK)).status_code == 404

    session, _ = gateway.play(agent, limits=replace(LIMITS, max_turns=1))
    assert session.notes.refusal == "max_turns"
    assert session.notes.counts["refused"] == 3


def test_keys_are_closed_though_the_trajectory_is_cancelled_twice(gateway: Bench) -> None:
    async def agent(session, model):
        process = process_of(session)
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def other() -> None:
            async with gateway.gateways.session(LIMITS, model.answer, model.parse) as second:
                opened.set_result(second.endpoint.base_url)
                await asyncio.Event().wait()

        task = asyncio.ensure_future(other())
        url = f"{await opened}/chat/completions"
        process.suspend()  # it reads all at once afterwards
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        process.resume()
        answer = await post(url, json=ASK)
        assert answer.json()["error"]["code"] == "key_closed"

    gateway.play(agent)

"""Requests over one connection: in order, without mutual waits;
and their remains after a failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import h11
import pytest
import uvicorn
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.request_pipeline import RequestPipeline, ServerAnswer, _Connection
from megatron_dapo.servers.server_error import KeyRefused, ServerError
from tests.helpers import free_port

pytestmark = pytest.mark.unit

Handler = Callable[[bytes], Awaitable[None]]


@asynccontextmanager
async def aiohttp_server(handle: Handler) -> AsyncIterator[str]:
    """The URL of a server that calls this with the body of each POST and answers when it returns.
    At its end all of its work is over."""

    async def answer(request: web.Request) -> web.Response:
        await handle(await request.read())
        return web.json_response({"success": True})

    application = web.Application()
    application.add_routes([web.post("/do", answer)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def uvicorn_server(handle: Handler) -> AsyncIterator[str]:
    """The same on SGLang's own server library."""

    async def application(scope: dict, receive: Callable, send: Callable) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await handle(body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"success": true}'})

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=port, lifespan="off", log_level="error"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


@pytest.mark.parametrize("server", [aiohttp_server, uvicorn_server])
def test_a_server_takes_up_requests_one_by_one_in_the_order_of_the_calls_whatever_their_sizes(server):
    events: list[tuple[str, int]] = []

    async def handle(body: bytes) -> None:
        events.append(("begin", len(body)))
        await asyncio.sleep(0.001)
        events.append(("end", len(body)))

    sizes = [300_000, 3, 200_000, 2, 1, 100_000]

    async def run() -> list[ServerAnswer]:
        async with server(handle) as url:
            pipeline = RequestPipeline(url, {})
            return await asyncio.gather(*(pipeline.post("/do", b"x" * size) for size in sizes))

    answers = asyncio.run(run())
    assert events == [(event, size) for size in sizes for event in ("begin", "end")]
    assert {(answer.status, answer.content_type) for answer in answers} <= {
        (200, "application/json"),
        (200, "application/json; charset=utf-8"),
    }


def test_the_next_request_is_there_before_the_answer_to_the_last_one():
    async def run() -> list[ServerAnswer]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for number in (b"1", b"2"):
                # never, if the second waits for an answer
                await reader.readuntil(b"body " + number)
            for number in (b"1", b"2"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + number)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            pipeline = RequestPipeline(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
            return await asyncio.gather(pipeline.post("/", b"body 1"), pipeline.post("/", b"body 2"))

    assert [answer.body for answer in asyncio.run(run())] == [b"1", b"2"]


@pytest.mark.parametrize("server", [aiohttp_server, uvicorn_server])
def test_a_call_that_is_given_up_fails_those_behind_it_which_are_not_taken_up(server):
    begun: list[bytes] = []

    async def run() -> None:
        is_begun, may_end = asyncio.Event(), asyncio.Event()

        async def handle(body: bytes) -> None:
            begun.append(body)
            is_begun.set()
            await may_end.wait()

        async with server(handle) as url:
            pipeline = RequestPipeline(url, {})
            first, second = (asyncio.create_task(pipeline.post("/do", body)) for body in (b"1", b"2"))
            await is_begun.wait()
            first.cancel()
            with pytest.raises(OSError):
                await second
            may_end.set()
            assert (await pipeline.post("/do", b"3")).status == 200, "the next call has a connection of its own"

    asyncio.run(run())
    assert begun == [b"1", b"3"]


def test_a_call_that_is_given_up_resets_the_connection():
    """An orderly end is not seen by a server that works on a request: it would answer, and begin
    with the next one."""

    async def run() -> None:
        is_there, was_reset = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"body")
            is_there.set()
            with pytest.raises(ConnectionResetError):
                await reader.read()
            was_reset.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            pipeline = RequestPipeline(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
            call = asyncio.create_task(pipeline.post("/", b"body"))
            await is_there.wait()
            call.cancel()
            await asyncio.wait_for(was_reset.wait(), 60)

    asyncio.run(run())


def test_where_no_connection_is_made_nothing_behind_it_is_sent():
    async def run() -> None:
        begun: list[bytes] = []

        async def handle(body: bytes) -> None:
            begun.append(body)

        async with aiohttp_server(handle) as url:
            pipeline = RequestPipeline(url, {})
            connect, may_fail = pipeline._connect, asyncio.Event()

            async def refused() -> _Connection:
                await may_fail.wait()
                pipeline._connect = connect
                raise ConnectionRefusedError

            pipeline._connect = refused
            calls = [asyncio.create_task(pipeline.post("/do", body)) for body in (b"1", b"2")]
            await asyncio.sleep(0)  # both have asked for their turn
            may_fail.set()
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [ConnectionRefusedError, ConnectionError]
            assert (await pipeline.post("/do", b"3")).status == 200
        assert begun == [b"3"]

    asyncio.run(run())


ANSWERS = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nnone",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n",
)


@given(st.lists(st.integers(0, sum(map(len, ANSWERS)))))
def test_answers_are_the_same_wherever_their_bytes_are_cut(cuts: list[int]):
    data = b"".join(ANSWERS)
    bounds = [0, *sorted(cuts), len(data)]

    async def run() -> list[ServerAnswer]:
        connection = _Connection()
        connection._transport = SimpleNamespace(write=lambda data: None, close=lambda: None)
        request = h11.Request(method="POST", target="/", headers=[("Host", "a"), ("Content-Length", "0")])
        futures = [connection.send(request, b"") for _ in ANSWERS]
        for start, end in zip(bounds, bounds[1:], strict=False):
            connection.data_received(data[start:end])
        assert connection.has_ended, "no answer is awaited"
        return [await future for future in futures]

    assert asyncio.run(run()) == [ServerAnswer(400, "text/plain", b"none"), ServerAnswer(200, "", b"onetwo")]


UPDATE = {"names": ["w"], "dtypes": ["float32"], "shapes": [(1,)], "group_name": "g", "weight_version": 1}


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"", ServerError, "no answer: ConnectionResetError"),
        (b"SSH-2.0\r\n\r\n", ServerError, "no answer: RemoteProtocolError"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", KeyRefused, "demands a key"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nwhy", ServerError, "HTTP 400: why"),
    ],
)
def test_an_update_that_fails_is_an_error_of_the_server(answer: bytes, error: type[ServerError], words: str):
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, SGLangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            await client.update_weights_from_distributed(**UPDATE, flush_cache=False)

    with pytest.raises(error, match=words):
        asyncio.run(run())


def test_an_update_that_is_not_answered_in_time_is_an_error_of_the_server():
    async def run() -> None:
        async with aiohttp_server(lambda body: asyncio.sleep(0)) as url, SGLangClient(url) as client:
            await client.update_weights_from_distributed(**UPDATE, flush_cache=False, timeout_s=0.0)

    with pytest.raises(ServerError, match="nothing within 0 s"):
        asyncio.run(run())

"""Pipelined requests, taken up by a server in the order sent, without waiting for one another."""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import h11

_NO_LINGERING = struct.pack("ii", 1, 0)  # struct linger: on, for 0 seconds


@dataclass(frozen=True)
class ServerAnswer:
    """An answer of a server."""

    status: int  # of HTTP
    content_type: str  # "" if the server names none
    body: bytes


class RequestPipeline:
    """POST requests over one connection (HTTP/1.1 pipelining, RFC 9112, section 9.3.2).

    Use it inside one event loop.

    A server answers the requests of a connection in order, and begins with one only after the
    answer before it: a POST may change the state found by the next one. On two connections the
    later request can overtake the earlier one. uvicorn, on which SGLang runs, and aiohttp keep the
    next requests unread until then.

    The connection lasts as long as an answer is awaited. So no request meets an idle one closed by
    the server.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Prepare requests to the server at `url`, with these headers; open no connection yet."""
        self._url = urlsplit(url)
        self._headers = headers
        self._connection: _Connection | None = None
        self._turn = asyncio.Lock()  # lets its waiters in as they came
        self._num_failed_connections = 0

    async def post(self, route: str, body: bytes) -> ServerAnswer:
        """Send a JSON document and return the answer. Requests go out in the order of the calls.

        A cancelled call ends the connection, and with it the calls under way. The server takes up
        none of the requests not begun yet, unless its answer to the one before is on the way
        already. If no connection can be made, the calls waiting for it fail too.

        Raises OSError if there is no connection or it ends early, and h11.RemoteProtocolError for
        an answer without the form of HTTP.
        """
        num_failed = self._num_failed_connections
        async with self._turn:
            if num_failed != self._num_failed_connections:
                raise ConnectionError("the request before it was not sent")
            if self._connection is None or self._connection.has_ended:
                try:
                    self._connection = await self._connect()
                except BaseException:
                    self._num_failed_connections += 1
                    raise
            connection = self._connection
            answer = connection.send(self._request(route, body), body)
        try:
            return await answer
        except asyncio.CancelledError:
            connection.abort()
            raise

    def close(self) -> None:
        """End the connection; calls under way fail."""
        if self._connection is not None:
            self._connection.abort()

    async def _connect(self) -> "_Connection":
        is_secure = self._url.scheme == "https"
        port = self._url.port or (443 if is_secure else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._url.hostname or "", port, ssl=True if is_secure else None
        )
        return connection

    def _request(self, route: str, body: bytes) -> h11.Request:
        host = self._url.netloc.rpartition("@")[2]
        headers = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= self._headers
        return h11.Request(method="POST", target=self._url.path + route, headers=list(headers.items()))


@dataclass
class _Exchange:
    """One request and the part of its answer so far."""

    answer: asyncio.Future[ServerAnswer]
    parser: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    response: h11.Response | None = None
    body: bytearray = field(default_factory=bytearray)

    def receive(self, data: bytes) -> bytes | None:
        """Take in bytes of the answer; return those after its end, None if it is incomplete."""
        self.parser.receive_data(data)
        while True:
            event = self.parser.next_event()
            if isinstance(event, h11.Response):
                self.response = event
            elif isinstance(event, h11.Data):
                self.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._finish()
                return self.parser.trailing_data[0]
            elif event is h11.NEED_DATA:
                return None

    def _finish(self) -> None:
        assert self.response is not None, "the end of a message comes after its beginning"
        content_type = dict(self.response.headers).get(b"content-type", b"").decode("latin-1")
        if not self.answer.done():
            self.answer.set_result(ServerAnswer(self.response.status_code, content_type, bytes(self.body)))


class _Connection(asyncio.Protocol):
    """A connection with its unanswered requests."""

    def __init__(self) -> None:
        self.has_ended = False
        self._transport: asyncio.Transport
        self._exchanges: deque[_Exchange] = deque()

    def send(self, request: h11.Request, body: bytes) -> asyncio.Future[ServerAnswer]:
        """Write a request behind the sent ones; return its answer to come."""
        exchange = _Exchange(asyncio.get_running_loop().create_future())
        head = exchange.parser.send(request) or b""
        data = exchange.parser.send(h11.Data(data=body)) or b""
        end = exchange.parser.send(h11.EndOfMessage()) or b""
        self._exchanges.append(exchange)
        self._transport.write(head + data + end)
        return exchange.answer

    def abort(self) -> None:
        """End the connection at once.

        The server can answer no more, and begins with no unread request.
        """
        if self.has_ended:
            return
        self.has_ended = True
        if (sock := self._transport.get_extra_info("socket")) is not None:
            # a reset: a server at work on a request does not see an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of a class of their own

    def data_received(self, data: bytes) -> None:
        rest: bytes | None = data
        try:
            while rest and self._exchanges:
                rest = self._exchanges[0].receive(rest)
                if rest is not None:
                    self._exchanges.popleft()
        except h11.RemoteProtocolError as error:
            self._fail(error)
            self.abort()
            return
        if not self._exchanges:
            self.has_ended = True
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = True
        self._fail(error or ConnectionResetError("the connection ended before the answer"))

    def _fail(self, error: Exception) -> None:
        while self._exchanges:
            exchange = self._exchanges.popleft()
            if not exchange.answer.done():
                exchange.answer.set_exception(error)

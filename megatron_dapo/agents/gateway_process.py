"""One gateway: `python -m megatron_dapo.agents.gateway_process`, with a socket to the controller as
standard input.

It ends with the controller, at any work.
"""

import asyncio
import hashlib
import logging
import os
import resource
import socket
from functools import partial
from types import ModuleType
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from megatron_dapo.agents import chat_dialect, messages_dialect
from megatron_dapo.agents.channel import FAILED, open_channel
from megatron_dapo.agents.gateway_session import GatewayParts, GatewaySession, key_closed
from megatron_dapo.agents.gateways import GatewaySettings
from megatron_dapo.agents.model_requests import OWN_SAMPLING, ModelRequest, Reply, check_model, check_request
from megatron_dapo.agents.parsing import load_parser
from megatron_dapo.agents.template_probe import template_fault
from megatron_dapo.agents.turns import Limits, TurnRefused
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.data.tokenizer import load_tokenizer

_KEYS = "actor_rollout_ref.rollout.agent"
_MAX_CONNECTIONS = 8192
_SPARE_FILES = 64
_MAX_CLOSED = 100_000
_DIALECTS = {"chat/completions": chat_dialect, "messages": messages_dialect, "tokens": chat_dialect}
_ROUTES = {*_DIALECTS, "messages/count_tokens", "reward"}

log = logging.getLogger(__name__)


class Gateway:
    """The process: its keys, and its connections."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[GatewaySession, bool]] = {}  # (session, whether it is that of the reward)
        self._closed: dict[str, None] = {}
        self._silent: set[asyncio.BaseProtocol] = set()  # connections before their first request

    async def run(self, side: socket.socket) -> None:
        """Serve until the controller has ended."""
        self._channel = await open_channel(side, self._take)
        await self._channel.serve()

    async def _take(self, name: str, fields: dict[str, Any]) -> Any:
        """Answer the controller."""
        if name == "start":
            return await self._start(GatewaySettings(**fields))
        if name == "end":
            return await self._keys[fields["session"]][0].end()
        if name == "open":
            key, reward_key = fields["keys"]
            session = GatewaySession(key, self._parts, Limits(**fields["limits"]), self._channel)
            self._keys |= {key: (session, False), reward_key: (session, True)}
            return None
        ended = [self._keys.pop(key, None) for key in fields["keys"]]  # None: its opening was cancelled
        self._closed |= dict.fromkeys(fields["keys"])
        while len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        if ended[0] is not None:
            await ended[0][0].end()
        return None

    async def _start(self, settings: GatewaySettings) -> dict[str, Any]:
        """Listen; return the port, or the user's mistake."""
        self._settings = settings
        try:
            tokenizer = load_tokenizer(settings.model)
            if settings.apply_chat_template and settings.history == "tokens":
                if fault := template_fault(tokenizer, settings.template_kwargs):
                    raise UserError(fault)
            calls = load_parser(f"{_KEYS}.tool_parser", settings.tool_parser)
            thoughts = load_parser(f"{_KEYS}.reasoning_parser", settings.reasoning_parser)
            self._parts = GatewayParts(settings, tokenizer, calls, thoughts)
            return {"port": await self._listen()}
        except UserError as error:
            return {"user_error": error.sentences}

    async def _listen(self) -> int:
        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = max(files, min(most, _MAX_CONNECTIONS + _SPARE_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.BaseProtocol:
            if len(server.connections) >= min(files - _SPARE_FILES, _MAX_CONNECTIONS):
                return _TooMany()
            protocol = server()
            self._silent.add(protocol)
            loop.call_later(self._settings.silence_s, self._drop_silent, protocol)
            return protocol

        host, port, path = self._settings.host, self._settings.port, self._settings.socket
        try:
            listener = await loop.create_server(connection, host, port or 0, backlog=1024)
            await loop.create_unix_server(connection, path, backlog=1024)
        except OSError as error:
            raise UserError(
                f"{_KEYS}: a gateway cannot listen at host {host!r}, port {port or 'any'} and {path!r} ({error}); "
                f"choose a free `port` (null = any), a `host` of this machine, and a short TMPDIR."
            ) from error
        os.chmod(path, 0o666)  # its folder is closed to others; a sandbox may run as another user
        return listener.sockets[0].getsockname()[1]

    def _drop_silent(self, protocol: Any) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            protocol.force_close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request; errors in the form of its API."""
        self._silent.discard(request.protocol)
        key, route = _key_and_route(request)
        is_anthropic = route.startswith("messages") or "anthropic-version" in request.headers
        dialect = _DIALECTS.get(route, messages_dialect if is_anthropic else chat_dialect)
        session, is_of_reward = self._keys.get(key, (None, False))
        try:
            if session is None or is_of_reward != (route == "reward"):
                session = None
                unknown = TurnRefused(401, "invalid_api_key", "This key is unknown here.")
                raise key_closed() if key in self._closed else unknown
            kind, _, wanted = route.partition("/")
            if request.method == "GET" and kind == "models":
                return _json(200, self._models(wanted))
            if request.method != "POST" or route not in _ROUTES:
                raise TurnRefused(404, "not_found", f"There is no {request.method} /{route[:100]} here.")
            async with session.slot():
                return await self._answer(session, request, route, dialect)
        except ConnectionResetError:
            raise
        except Exception as error:
            refused = _refused(error)
            if session is not None:
                session.note_refusal(refused, route in _DIALECTS)
            return _json(refused.status, _error_body(refused, dialect))

    def _models(self, wanted: str) -> dict[str, Any]:
        """Return the wanted model, or for "" the list of it, as both APIs have it."""
        name = self._settings.model_name
        check_model(wanted or name, name)
        of_openai = {"object": "model", "created": 0, "owned_by": "megatron_dapo"}
        model = {"id": name, "type": "model", "display_name": name, **of_openai}
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        return model if wanted else listed

    async def _answer(
        self, session: GatewaySession, request: web.BaseRequest, route: str, dialect: ModuleType
    ) -> web.StreamResponse:
        body, fields = await self._fields(request)
        if route == "reward":
            session.post(fields)
            return _json(200, {})
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._parts.texts, dialect.parse, fields)  # seconds for a million parts
        check_request(asked, self._settings.model_name, session.limits.max_choices)
        if route == "messages/count_tokens":
            return _json(200, {"input_tokens": await session.num_tokens(asked)})
        if any(fields.get(name) is not None for name in OWN_SAMPLING):
            session.add("overruled")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        if is_retry:
            session.add("retries")
        digest = hashlib.sha256(f"{route} ".encode() + body).digest()
        async with session.joined(digest, is_retry, partial(session.answer, asked)) as task:
            return await self._deliver(session, request, asked, task, dialect)

    async def _fields(self, request: web.BaseRequest) -> tuple[bytes, dict[str, Any]]:
        """Return the body, and the fields in it. Raises TurnRefused."""
        most = self._settings.max_request_mb << 20
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.silence_s):
                while (request.content_length or 0) <= most and len(body) <= most:
                    if not (part := await request.content.readany()):
                        break
                    body += part
                else:
                    words = f"The body has more than {most >> 20} MiB (max_request_mb)."
                    raise TurnRefused(413, "request_too_large", words)
            fields = orjson.loads(body)
        except (TimeoutError, aiohttp.ClientError, web.RequestPayloadError) as error:
            raise TurnRefused(400, "invalid_body", f"The body did not come: {error or 'too slow'}.") from None
        except orjson.JSONDecodeError as error:
            raise TurnRefused(400, "invalid_json", f"The body is no JSON: {error}.") from None
        if not isinstance(fields, dict):
            raise TurnRefused(400, "invalid_json", "The body is no JSON object.")
        return bytes(body), fields

    async def _deliver(
        self,
        session: GatewaySession,
        request: web.BaseRequest,
        asked: ModelRequest,
        task: "asyncio.Task[Reply]",
        dialect: ModuleType,
    ) -> web.StreamResponse:
        """Write the answer once it is there, and until then signs of life: white space before JSON.

        An error after such a sign is the stream's last event. Without a stream the connection is
        closed: the client asks again, and gets the error.
        """
        kind = "text/event-stream" if asked.is_streamed else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        assert request.transport is not None, "a closed connection cancels its handler"
        request.transport.set_write_buffer_limits(0)  # so that a write waits until the bytes are away
        while not (await asyncio.wait({task}, timeout=self._settings.keep_alive_s))[0]:
            await response.prepare(request)
            await response.write(dialect.PING if asked.is_streamed else b" ")
        try:
            if task.cancelled():
                raise key_closed()
            reply = task.result()
            parts = dialect.events(reply, asked.wants_usage) if asked.is_streamed else [_dumps(dialect.body(reply))]
        except Exception as error:
            if not response.prepared:
                raise
            session.note_refusal(_refused(error), True)
            if not asked.is_streamed:
                request.transport.abort()
                return response
            parts, reply = [dialect.event(_error_body(_refused(error), dialect))], None
        text = b"".join(parts)
        if not response.prepared:
            response.content_length = len(text)
        await response.prepare(request)
        await response.write(text)
        await response.write_eof()
        is_there = request.transport is not None and not request.transport.is_closing()  # as after a failed write
        if reply is not None and is_there:
            session.note_delivery(reply)
        return response


class _TooMany(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


def _key_and_route(request: web.BaseRequest) -> tuple[str, str]:
    """Return the key of the path, else of a header, and the route without /v1."""
    parts = request.path.strip("/").split("/")
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        key = request.headers.get("X-Api-Key", "")
    if parts[0] == "t" and len(parts) > 1:
        key, parts = parts[1], parts[2:]
    return key.strip(), "/".join(parts[1:] if parts[:1] == ["v1"] else parts)


def _refused(error: Exception) -> TurnRefused:
    """Return an error as the client is told it."""
    if isinstance(error, TurnRefused):
        return error
    log.error("a request failed", exc_info=error)
    return TurnRefused(*FAILED)


def _error_body(error: TurnRefused, dialect: ModuleType) -> dict[str, Any]:
    return dialect.error_body(error.status, error.code, str(error), error.param)


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _json(status: int, value: Any) -> web.Response:
    return web.Response(status=status, body=_dumps(value), content_type="application/json")


if __name__ == "__main__":
    logging.basicConfig(format="gateway: %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # of clients that speak no HTTP
    end_with_parent(os.getppid())
    asyncio.run(Gateway().run(socket.socket(fileno=0)))

"""Questions and answers between two processes, in JSON lines over a socket, both ways at once."""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import orjson

from megatron_dapo.agents.turns import TurnRefused

_MAX_LINE_BYTES = 256 << 20  # far above a long branch's tokens; a longer one is none of ours
FAILED = (500, "server_error", "The trainer could not answer this request.")

log = logging.getLogger(__name__)

AnswerQuestion = Callable[[str, dict], Awaitable[Any]]
"""(name, fields) -> value. Its TurnRefused reaches the asker; any other error is logged, and reaches
it as `FAILED`."""


class ChannelClosed(Exception):
    """The process on the other side has ended."""


class Channel:
    """One side; `open_channel` makes it. Questions are taken once it serves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: AnswerQuestion) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future] = {}
        self._answering: dict[int, asyncio.Task] = {}

    async def serve(self) -> None:
        """Answer questions until the other side has ended; then cancel the answers under way, and
        let all own questions raise ChannelClosed."""
        try:
            with suppress(ConnectionError, ValueError):  # half a line of a killed process
                while line := await self._reader.readline():
                    self._take(orjson.loads(line))
        finally:
            self._writer.close()
            for task in self._answering.values():
                task.cancel()
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ChannelClosed())

    async def ask(self, name: str, fields: Any) -> Any:
        """Return the other side's answer to a question; cancelled, the other side's work is too.

        Raises ChannelClosed, TurnRefused.
        """
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, "name": name, "fields": fields})
            return await answered
        except asyncio.CancelledError:
            with suppress(ChannelClosed):
                self._send({"cancel": number})
            raise
        finally:
            del self._asked[number]

    def _take(self, message: dict) -> None:
        if (number := message.get("ask")) is not None:
            self._answering[number] = task = asyncio.create_task(self._reply(message))
            task.add_done_callback(lambda _: self._answering.pop(number))
        elif "cancel" in message:
            if answering := self._answering.get(message["cancel"]):
                answering.cancel()
        elif (asked := self._asked.get(message["answer"])) and not asked.done():  # else it was cancelled
            if "refused" in message:
                asked.set_exception(TurnRefused(*message["refused"]))
            else:
                asked.set_result(message["value"])

    async def _reply(self, question: dict) -> None:
        reply: dict[str, Any] = {"refused": FAILED}
        try:
            reply = {"value": await self._answer(question["name"], question["fields"])}
        except TurnRefused as refused:
            reply = {"refused": [refused.status, refused.code, str(refused)]}
        except asyncio.CancelledError:  # also by its own work
            pass
        except Exception:
            log.exception("the answer to %r failed", question["name"])
        with suppress(ChannelClosed):
            self._send({"answer": question["ask"], **reply})

    def _send(self, message: dict) -> None:
        """Write without a wait: each side has as many questions under way as it can bear."""
        if self._writer.is_closing():
            raise ChannelClosed
        self._writer.write(orjson.dumps(message, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


async def open_channel(side: socket.socket, answer: AnswerQuestion) -> Channel:
    """Return this process's side of a pair of sockets."""
    return Channel(*await asyncio.open_unix_connection(sock=side, limit=_MAX_LINE_BYTES), answer)


def _plain(value: Any) -> Any:
    """Return a value that orjson does not know: an array that is not contiguous, or a set."""
    return value.tolist() if hasattr(value, "tolist") else list(value)

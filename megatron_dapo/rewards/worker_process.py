"""The inside of a worker process: JSON lines over stdin and stdout, under limits.

It takes one request at a time, or many of a coroutine.

It ends with its parent, at any work of the code it runs, with all its descendants: guarded.py.
"""

import asyncio
import inspect
import json
import os
import resource
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TextIO, cast

from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.guarded import run_guarded

Message = dict[str, Any]
Answer = Callable[[Message], Message]
AsyncAnswer = Callable[[Message], Awaitable[Message]]
GetReady = Callable[[Message], tuple[Message, Answer | AsyncAnswer]]

_ERROR_CHARS = 300
_TRACEBACK_CHARS = 4000
_MAX_FRAMES = 20
_MAX_LINE_BYTES = 1 << 28
_OUR_MODULES = (__name__, "__main__", "megatron_dapo.rewards.reward_registry", "functools", "asyncio.tasks")
# before the code that it runs can replace them: the protocol is not that code's business
_dumps = json.dumps
_loads = json.loads


def serve(get_ready: GetReady) -> None:
    """Answer requests, in a child process of this one, until the parent closes the pipe.

    Args:
        get_ready: settings (the first line, with memory_limit_mb, null: no limit) -> (greeting,
            function that answers a request); its UserError is the greeting {"user_error": ...}.
            The function's TimeoutError becomes {"error": "timeout"}, any other error "exception:
            ...". For a coroutine, each request and its answer have an "id", and {"cancel": id}
            ends one.
    """
    requests, replies = _take_pipes()
    run_guarded(lambda: _answer_requests(get_ready, requests, replies), requests.fileno())


def _answer_requests(get_ready: GetReady, requests: TextIO, replies: TextIO) -> None:
    settings = _loads(requests.readline())
    _limit_memory(settings["memory_limit_mb"])
    try:
        greeting, answer = get_ready(settings)
    except UserError as error:
        _send(replies, {"user_error": error.sentences})
        return
    _send(replies, greeting)
    if inspect.iscoroutinefunction(answer):
        asyncio.run(_answer_side_by_side(answer, requests, replies))
        return
    for line in requests:
        _send(replies, _reply(cast(Answer, answer), _loads(line)))


async def _answer_side_by_side(answer: AsyncAnswer, requests: TextIO, replies: TextIO) -> None:
    lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)
    tasks: dict[int, asyncio.Task] = {}

    async def reply(number: int, message: Message) -> None:
        try:
            answered = await answer(message)
        except asyncio.CancelledError:
            answered = {"error": "timeout"}
        except BaseException as error:
            answered = _error(error)
        _send(replies, {"id": number, **answered})
        del tasks[number]

    while line := await lines.readline():
        message = _loads(line)
        if "cancel" in message:
            if task := tasks.get(message["cancel"]):
                task.cancel()
            continue
        number = message.pop("id")
        tasks[number] = asyncio.create_task(reply(number, message))


def _reply(answer: Answer, message: Message) -> Message:
    try:
        return answer(message)
    except BaseException as error:
        return _error(error)


def _error(error: BaseException) -> Message:
    """Return the answer to a request with an error of its function.

    Any error of user code, even SystemExit, costs only that request.
    """
    if isinstance(error, TimeoutError):
        return {"error": "timeout"}
    text = "".join(traceback.format_exception_only(error)).strip()
    # files hold no half surrogate pairs
    readable = text[:_ERROR_CHARS].encode(errors="backslashreplace").decode()
    return {"error": f"exception: {readable}", "traceback": _traceback(error)}


def _traceback(error: BaseException) -> str:
    """Return the traceback from the first frame outside our own modules."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _OUR_MODULES:
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames, limit=-_MAX_FRAMES, chain=False)
    return "".join(lines)[-_TRACEBACK_CHARS:].encode(errors="backslashreplace").decode()


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Return the protocol's pipes, out of the way of code that prints or reads: that gets /dev/null
    and stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _send(replies: TextIO, message: Message) -> None:
    replies.write(_dumps(message) + "\n")
    replies.flush()


def _limit_memory(megabytes: int | None) -> None:
    if megabytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

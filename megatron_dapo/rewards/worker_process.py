"""The inside of a worker process: JSON lines over stdin and stdout, one request at a time, under limits.

It ends with its parent, whatever the code it runs is doing: a thread watches the pipe, and a limit on CPU time catches
code that never lets that thread run.
"""

import json
import math
import os
import resource
import select
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Message = dict[str, Any]

_CPU_MARGIN_S = 10
_ERROR_CHARS = 300
_WATCH_STACK_BYTES = 1 << 18


def serve(get_ready: Callable[[Message], tuple[Message, Callable[[Message], Message]]]) -> None:
    """Answers requests until the parent closes the pipe.

    get_ready: settings (the first line, with timeout_s and memory_limit_mb) -> (answer to it, function that answers a
    request). A TimeoutError of that function is answered by {"error": "timeout"}, any other by "exception: ...".
    """
    requests, replies = _take_pipes()
    # the usual one is what `ulimit -s` says, which may be more than the memory limit
    usual = threading.stack_size(_WATCH_STACK_BYTES)
    threading.Thread(target=_end_with_parent, args=(requests.fileno(),), daemon=True).start()
    threading.stack_size(usual)
    settings = json.loads(requests.readline())
    _limit_memory(settings["memory_limit_mb"])
    hello, answer = get_ready(settings)
    _send(replies, hello)
    for line in requests:
        _limit_cpu_time(settings["timeout_s"])
        _send(replies, _reply(answer, json.loads(line)))


def _reply(answer: Callable[[Message], Message], message: Message) -> Message:
    try:
        return answer(message)
    except TimeoutError:
        return {"error": "timeout"}
    except BaseException as error:  # whatever user code throws, SystemExit included, costs this one sample
        text = "".join(traceback.format_exception_only(error)).strip()
        readable = text[:_ERROR_CHARS].encode(errors="backslashreplace").decode()  # files hold no half surrogate pairs
        return {"error": f"exception: {readable}"}


def _take_pipes() -> tuple[TextIO, TextIO]:
    """The protocol's pipes, out of the way of code that prints or reads: that gets /dev/null and stderr."""
    requests, replies = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _send(replies: TextIO, message: Message) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _limit_memory(megabytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu_time(timeout_s: float) -> None:
    """The soft limit moves on with every request: CPU time used so far, the deadline, a margin."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + timeout_s + _CPU_MARGIN_S)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))


def _end_with_parent(pipe: int) -> None:
    watch = select.poll()
    watch.register(pipe, 0)  # hang-up is always reported; data is not asked for
    watch.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # what the code started goes too
    os._exit(1)

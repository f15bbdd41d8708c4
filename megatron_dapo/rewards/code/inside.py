"""The inside of a sandbox: runs one program on one test after the other.

Each test has a fresh fork of this interpreter. `sandbox.py` passes this file's text to `python -c`:
it imports only the standard library. It gets inputs and sends outputs, which are judged outside, so
a program that takes this process over gains nothing.

Requests are lines of JSON, first the settings. An answer is a status (a byte), a length and the
output.
"""

import _sitebuiltins
import bisect
import builtins
import collections
import copy
import datetime
import functools
import heapq
import io
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import select
import signal
import statistics
import string
import struct
import sys
import time
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

DONE, FAILED, TIMED_OUT = b"d", b"f", b"t"
ANSWER = struct.Struct(">cI")
MAX_OUTPUT_BYTES = 16 << 20

# used without import by solutions written for APPS, TACO and the like: star imports and modules, as
# in verl
_STAR_MODULES = (
    *(string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools),
    *(operator, io, sys, json, typing, builtins),
)
_RECURSION_LIMIT = 600_000  # as in verl; the memory limit holds before
_LOOK_S = 0.001


def _serve() -> None:
    """Answer requests until there are no more. In the forks it returns: an interpreter's regular
    end joins threads."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    settings = json.loads(requests.readline())
    for name, value in settings["limits"].items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (value, value))
    _answer(replies, DONE, b"")
    for line in requests:
        test = json.loads(line)
        standard_input = _file(test.get("stdin", "").encode(errors="surrogatepass"))
        output = _file(b"")
        if (child := os.fork()) == 0:
            requests.close()
            replies.close()
            if not settings["alone"]:
                os.setpgid(0, 0)
            _run(settings["code"], test, standard_input, output)
            return
        status = _wait(child, test["time_limit_s"])
        _end_all(child, settings["alone"])
        size = os.fstat(output).st_size
        if status == DONE and size <= MAX_OUTPUT_BYTES:
            _answer(replies, DONE, os.pread(output, size, 0))
        else:
            _answer(replies, FAILED if status == DONE else status, b"")
        os.close(standard_input)
        os.close(output)


def _answer(replies: BinaryIO, status: bytes, output: bytes) -> None:
    replies.write(ANSWER.pack(status, len(output)) + output)
    replies.flush()


def _file(content: bytes) -> int:
    """Return a file without a name that holds the content, to be read from its beginning."""
    number = os.open("/tmp", os.O_RDWR | os.O_TMPFILE, 0o600)
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _wait(child: int, time_limit_s: float) -> bytes:
    """Return the program's status at its end; kill it at its limit."""
    ended = os.pidfd_open(child)
    watch = select.poll()
    watch.register(ended, select.POLLIN)
    in_time = watch.poll(time_limit_s * 1000)
    os.close(ended)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time or code == -signal.SIGXCPU:
        return TIMED_OUT
    return DONE if code == 0 else FAILED


def _end_all(child: int, alone: bool) -> None:
    """Kill the program's leftovers: all processes but this one and the first; without a sandbox its
    process group."""
    if not alone:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        return
    assert os.getpid() == 2, "only in a separate sandbox, where this is the second process"
    with suppress(ProcessLookupError):  # when they are all gone
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(_LOOK_S)


def _run(code: str, test: dict[str, Any], standard_input: int, output: int) -> None:
    """Run the program on a test; an exception ends this process with a nonzero exit code."""
    seconds = math.ceil(test["time_limit_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    reads_stdin = "stdin" in test
    os.dup2(standard_input, 0)
    os.close(standard_input)
    if reads_stdin:
        os.dup2(output, 1)
        os.close(output)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    namespace = _namespace("__main__" if reads_stdin else "solution")
    exec(compile(code, "solution.py", "exec"), namespace)
    if not reads_stdin:
        values = [_encoded(value) for value in _values(test, namespace)]
        with open(output, "w", encoding="utf-8", errors="surrogatepass") as file:
            json.dump(values, file)


def _namespace(name: str) -> dict[str, Any]:
    """Return the program's predefined names."""
    module = sys.modules[name] = types.ModuleType(name)
    builtins.exit = _sitebuiltins.Quitter("exit", "")
    builtins.quit = _sitebuiltins.Quitter("quit", "")
    namespace = vars(module)
    for star in _STAR_MODULES:
        public = getattr(star, "__all__", None) or [key for key in vars(star) if not key.startswith("_")]
        namespace.update((key, getattr(star, key)) for key in public)
    for star in _STAR_MODULES:
        namespace[star.__name__] = star
    return namespace


def _values(test: dict[str, Any], namespace: dict[str, Any]) -> list[Any]:
    """Return the results of a function of the program, or of expressions."""
    if "expressions" in test:
        return [eval(compile(text, "test.py", "eval"), namespace) for text in test["expressions"]]
    name = test["call"]
    owner = namespace["Solution"]() if "Solution" in namespace else None
    call: Callable[..., Any] = getattr(owner, name) if hasattr(owner, name) else namespace[name]
    return [call(*test["arguments"])]


def _encoded(value: Any) -> Any:
    """Return a value as JSON can hold it, with the kind of each container. Raises TypeError for
    other objects."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, dict):
        return ["dict", [[_encoded(key), _encoded(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_encoded(item) for item in value]]
    raise TypeError(f"a {type(value).__name__} cannot be compared")


if __name__ == "__main__":
    _serve()

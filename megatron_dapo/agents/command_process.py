"""Runs commands to their end: under a guard (command_guard.py), and in a sandbox if asked to.

A sandbox is for programs that a model wrote or steers. They see /usr and our interpreter,
read-only, and a /tmp of bounded size. They are alone in a network of their own, and have no
environment but the given one. Processes, memory and files are limited. Nothing stays at the end.
"""

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_dapo.agents.in_sandbox import MAX_RESULT_BYTES
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import shell_exit_code
from megatron_dapo.rewards.code.bubblewrap import ROOT, USER_NAMESPACE, Way
from megatron_dapo.rewards.code.sandbox import CURE, way_fault
from megatron_dapo.rewards.worker_environment import worker_environment

PORT = 18080
"""The gateway's, in a sandbox's own network."""

_GUARD_S = 15.0  # for the guard to kill all; then it is killed itself
_KEPT_BYTES = 1 << 15  # of the beginning of an output, and of its end
_PAUSE_S = 0.01  # between chunks: nobody who only writes takes our core
_TMP_BYTES = 1 << 30
_LIMITS = {
    "RLIMIT_NPROC": 256,  # threads count
    "RLIMIT_NOFILE": 256,
    "RLIMIT_FSIZE": _TMP_BYTES,
    "RLIMIT_DATA": 4 << 30,  # of one process
    "RLIMIT_AS": 32 << 30,  # with reservations, which some interpreters make
    "RLIMIT_CORE": 0,
}
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "USER": "agent", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    exit_code: int
    """As a shell reports it: 128 and more after a signal, 127 if it did not start."""
    output: str
    """Standard output and error; of a long one the beginning and the end."""
    result: bytes = b""
    """In a sandbox the content of /tmp/result.json."""


async def run_in_sandbox(
    argv: Sequence[str],
    *,
    files: Mapping[str, str] | None = None,
    paths: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    socket: str | None = None,
) -> Ended:
    """Run a command in a sandbox of its own, in /tmp. All of it has ended when this returns or
    raises.

    Args:
        argv: the program and its arguments.
        files: texts of files and scripts, by their paths below /tmp.
        paths: absolute ones of files and folders of this machine that it may read.
        environment: variables besides PATH, HOME and the like.
        timeout_s: of the command; may be infinite.
        socket: a Unix socket of this machine, such as `Endpoint.socket`: http://127.0.0.1:PORT in
            there. Anybody may write it; its folder keeps others out.

    Raises:
        UserError: if no sandbox can be made here.
        TimeoutError: past timeout_s.
    """
    way = await asyncio.to_thread(_way)
    sandbox = {"way": way.name, "paths": [*paths, *filter(None, [socket])], "tmp_bytes": _TMP_BYTES}
    order = {"sandbox": sandbox, "files": dict(files or {}), "limits": _LIMITS, "socket": socket, "port": PORT}
    async with asyncio.timeout(timeout_s):
        return await run_to_end(argv, _ENVIRONMENT | dict(environment or {}), order=order)


@cache
def _way() -> Way:
    """Return the way to make sandboxes. For root not the user namespace, whose user could not open
    the gateway's socket. Raises UserError."""
    way = ROOT if os.geteuid() == 0 else USER_NAMESPACE
    if fault := way_fault(way):
        raise UserError(
            f"a command's sandbox (rollout.agent.sandbox) cannot be made here by {way.name}: {fault}; {CURE}; "
            f"rollout.agent.sandbox=false runs a command with this user's rights."
        )
    return way


async def run_to_end(
    argv: Sequence[str], environment: Mapping[str, str], grace_s: float = 0.0, order: dict[str, Any] | None = None
) -> Ended:
    """Run a command. When this returns or raises, it and all its descendants have ended.

    Args:
        environment: all of its variables.
        grace_s: cancelled, its process group gets SIGTERM and has so long before all are killed.
        order: for a sandbox, further fields of the orders of command_guard.py and in_sandbox.py.
    """
    near_end, far_end = os.pipe()
    with open(near_end, "rb", buffering=0) as results:
        with open(far_end, "wb"):
            with suppress(OSError):  # of a user with many pipes
                fcntl.fcntl(far_end, fcntl.F_SETPIPE_SZ, MAX_RESULT_BYTES)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megatron_dapo.agents.command_guard"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=worker_environment(os.environ, (), ""),
                start_new_session=True,  # untouched by Ctrl-C
                pass_fds=[far_end],
            )
        command = {"argv": list(argv), "environment": dict(environment), "grace_s": grace_s, "sandbox": None}
        output = await _watched(process, command | (order or {}) | {"result_pipe": far_end})
        assert process.returncode is not None, "it was waited for"
        os.set_blocking(near_end, False)
        code = shell_exit_code(process.returncode)
        return Ended(code, output.decode(errors="replace"), results.read(MAX_RESULT_BYTES) or b"")


async def _watched(process: asyncio.subprocess.Process, order: dict[str, Any]) -> bytes:
    """Give the guard its order; return the output when it has ended."""
    assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
    reading = asyncio.create_task(_head_and_tail(process.stdout))
    try:
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            await process.stdin.drain()
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait([reading], timeout=order["grace_s"] + _GUARD_S)
        raise
    finally:
        process.stdin.close()  # the guard ends now, if it has not
        try:
            async with asyncio.timeout(_GUARD_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        reading.cancel()


async def _head_and_tail(pipe: asyncio.StreamReader) -> bytes:
    """Return the beginning and the end of an output; a writer of much waits for us."""
    head, tail, num_bytes = b"", b"", 0
    while chunk := await pipe.read(2 * _KEPT_BYTES):
        num_bytes += len(chunk)
        room = _KEPT_BYTES - len(head)
        head += chunk[:room]
        tail = (tail + chunk[room:])[-_KEPT_BYTES:]
        if len(chunk) > _KEPT_BYTES:
            await asyncio.sleep(_PAUSE_S)
    num_left_out = num_bytes - len(head) - len(tail)
    return head + (b"\n... %d bytes ...\n" % num_left_out if num_left_out else b"") + tail

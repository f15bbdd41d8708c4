"""Runs commands to their end, and in a sandbox if asked to.

A sandbox is for programs that a model wrote or steers. They see /usr and our interpreter,
read-only, and a /tmp of bounded size. They are alone in a network of their own, and have no
environment but the given one. Processes, memory and files are limited. Nothing stays at the end.

`python -m megatron_dapo.agents.command_process FILE` is the guard of one command. Its order is in
that inherited file, so that no secret is an argument. Its output is the command's. When the command
has ended, SIGTERM came or standard input is closed, all descendants of the command end.
"""

import asyncio
import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

from megatron_dapo.agents import in_sandbox
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import shell_exit_code
from megatron_dapo.rewards.code.bubblewrap import ROOT, USER_NAMESPACE, enclose
from megatron_dapo.rewards.code.sandbox import CURE, program_of, way_fault
from megatron_dapo.rewards.guarded import run_guarded
from megatron_dapo.rewards.worker_environment import worker_environment

PORT = 18080
"""The gateway's, in a sandbox's own network."""

# for root not the user namespace, whose user could not open the gateway's socket
_WAY = ROOT if os.geteuid() == 0 else USER_NAMESPACE
_GUARD_S = 15.0  # for the guard to kill all; then it is killed itself
_KEPT_BYTES = 1 << 15  # of the beginning of an output, and of its end
_LOOK_S = 1.0  # between looks whether the guard has ended
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
    await asyncio.to_thread(check_sandbox)
    sandbox = {"paths": [*paths, *filter(None, [socket])], "tmp_bytes": _TMP_BYTES}
    order = {"sandbox": sandbox, "files": dict(files or {}), "limits": _LIMITS, "socket": socket, "port": PORT}
    async with asyncio.timeout(timeout_s):
        return await run_to_end(argv, _ENVIRONMENT | dict(environment or {}), order=order)


@cache
def check_sandbox() -> None:
    """Raise UserError if no sandbox can be made here."""
    if fault := way_fault(_WAY):
        raise UserError(
            f"a command's sandbox (rollout.agent.sandbox) cannot be made here by {_WAY.name}: {fault}; {CURE}; "
            f"rollout.agent.sandbox=false runs a command with this user's rights."
        )


async def run_to_end(
    argv: Sequence[str], environment: Mapping[str, str], grace_s: float = 0.0, order: dict[str, Any] | None = None
) -> Ended:
    """Run a command. When this returns or raises, it and all its descendants have ended.

    Args:
        environment: all of its variables.
        grace_s: cancelled, its process group gets SIGTERM and has so long before all are killed.
        order: for a sandbox, further fields of the orders of `_become` and in_sandbox.py.
    """
    command = {"argv": list(argv), "environment": dict(environment), "grace_s": grace_s, "sandbox": None}
    with open(os.memfd_create("order"), "w+b", buffering=0) as file:
        file.write(json.dumps(command | (order or {})).encode())
        file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "megatron_dapo.agents.command_process", str(file.fileno())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=worker_environment(os.environ, (), ""),
            start_new_session=True,  # untouched by Ctrl-C
            pass_fds=[file.fileno()],
        )
        output = await _watched(process, grace_s + _GUARD_S)
        assert process.returncode is not None, "it was waited for"
        result = os.pread(file.fileno(), in_sandbox.MAX_RESULT_BYTES, 0) if order and not process.returncode else b""
        return Ended(shell_exit_code(process.returncode), output.decode(errors="replace"), result)


async def _watched(process: asyncio.subprocess.Process, end_s: float) -> bytes:
    """Return the output of a guard when it has ended. end_s: time for that when cancelled."""
    assert process.stdin is not None, "it was started with pipes"
    reading = asyncio.create_task(_head_and_tail(process))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait([reading], timeout=end_s)
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


async def _head_and_tail(process: asyncio.subprocess.Process) -> bytes:
    """Return the beginning and the end of a guard's output. A writer of much waits for us; at the
    guard's end nothing more is read, though another process may hold the pipe."""
    assert process.stdout is not None, "it was started with pipes"
    head, tail, num_bytes = b"", b"", 0
    chunk: bytes | None = None
    while chunk != b"":
        chunk = None if process.returncode is None else b""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                chunk = await process.stdout.read(2 * _KEPT_BYTES)
        if chunk:
            num_bytes += len(chunk)
            room = _KEPT_BYTES - len(head)
            head += chunk[:room]
            tail = (tail + chunk[room:])[-_KEPT_BYTES:]
            await asyncio.sleep(_PAUSE_S)
    num_left_out = num_bytes - len(head) - len(tail)
    return head + (b"\n... %d bytes ...\n" % num_left_out if num_left_out else b"") + tail


def _become(order: dict[str, Any], file: int) -> NoReturn:
    """Replace this process by the command, in its sandbox if it has one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order["sandbox"] is None:
        in_sandbox.become(order["argv"], order["environment"])
    command, filter_file, _ = enclose(_WAY, program_of(in_sandbox), **order["sandbox"], is_for_commands=True)
    os.set_inheritable(filter_file, True)
    os.dup2(file, 0)
    os.chdir("/")
    os.execvpe(command[0], command, {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})


def _guard(file: int) -> None:
    os.set_inheritable(file, False)
    with open(file, "rb", closefd=False) as text:
        order = json.loads(text.read())
    os.lseek(file, 0, os.SEEK_SET)
    run_guarded(partial(_become, order, file), sys.stdin.fileno(), order["grace_s"])


if __name__ == "__main__":
    _guard(int(sys.argv[1]))

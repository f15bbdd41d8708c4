"""Sandboxes for programs that a model wrote: no network, no home, no other process, few resources.

One serves one response: inside.py runs there and answers test by test. Its answers are data,
possibly written by the program.
"""

import inspect
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

import psutil

from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.code import inside
from megatron_dapo.rewards.code.bubblewrap import ROOT, UNSANDBOXED, USER_NAMESPACE, Way, enclose

_NUM_PROCESSES = 8  # with the sandbox's own two; threads count
_LIMITS = {"RLIMIT_NPROC": _NUM_PROCESSES, "RLIMIT_NOFILE": 32, "RLIMIT_FSIZE": 32 << 20, "RLIMIT_CORE": 0}
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_CHUNK_BYTES = 1 << 16
_PROBE_S = 20.0
_PROBE_MB = 512
_PROBE = """
import os, time
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    pass
print("limited" if count < 100 else "unlimited")
"""
CURE = (
    "install bubblewrap 0.7 or newer (`make setup-sandbox`), and let this user make namespaces (sysctl "
    "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt "
    "seccomp=unconfined, or root with --cap-add SYS_ADMIN)"
)


class SandboxLost(RuntimeError):
    """The sandbox did not start, ended, or did not keep to the protocol."""


@dataclass
class _SandboxSettings:
    """The settings of this process."""

    way: Way | None = None
    """None: not chosen yet."""
    time_limit_s: float = 4.0
    """For all tests of a response."""

    def choose(self, allow_unsandboxed: bool = False) -> Way:
        """Return the way, chosen at the first call. Raises UserError if there is only the
        unsandboxed one."""
        if self.way is None:
            try:
                self.way = find_way()
            except UserError:
                if not allow_unsandboxed:
                    raise
                self.way = UNSANDBOXED
        return self.way


SETTINGS = _SandboxSettings()


def find_way() -> Way:
    """Return a way that works here. Raises UserError naming the missing part."""
    if shutil.which("bwrap") is None:
        raise UserError(f"reward.function: code_tests needs a sandbox, and bwrap is not installed; {_cure()}.")
    reasons = []
    for way in (USER_NAMESPACE, ROOT) if os.geteuid() == 0 else (USER_NAMESPACE,):
        if (fault := way_fault(way)) is None:
            return way
        reasons.append(f"{way.name}: {fault}")
    raise UserError(
        f"reward.function: code_tests needs a sandbox, which cannot be made here ({'; '.join(reasons)}); {_cure()}."
    )


def _cure() -> str:
    return f"{CURE}; reward.allow_unsandboxed=true runs programs of the model with this user's rights"


def way_fault(way: Way) -> str | None:
    """Return why sandboxes of this kind cannot be made here or do not hold, or None."""
    try:
        with Sandbox(way, _PROBE, _PROBE_MB, time.monotonic() + _PROBE_S) as sandbox:
            output = sandbox.run({"stdin": "", "time_limit_s": _PROBE_S / 2})
    except (SandboxLost, TimeoutError, OSError, KeyError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None if output == "limited\n" else "the number of processes is not limited (kernels before 5.14)"


@dataclass
class Sandbox:
    """A sandbox for one program, as a context. Entering it raises SandboxLost if it does not start,
    TimeoutError past the deadline."""

    way: Way
    code: str
    memory_limit_mb: int
    deadline: float
    """Of all its work, in the monotonic clock's seconds."""
    _process: subprocess.Popen = field(init=False)

    def __enter__(self) -> "Sandbox":
        limits = dict(_LIMITS) if self.way.is_sandbox else {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": _LIMITS["RLIMIT_FSIZE"]}
        settings = {
            "code": self.code,
            "alone": self.way.is_sandbox,
            "limits": limits | {"RLIMIT_AS": self.memory_limit_mb << 20},
        }
        self._process = _start(self.way)
        try:
            self._ask(settings)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Kill everything in it."""
        if not self.way.is_sandbox:
            with suppress(psutil.Error):
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    process.kill()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None, "it was started with pipes"
            with suppress(BrokenPipeError):
                pipe.close()

    def run(self, test: dict[str, Any]) -> str | None:
        """Return the program's output on a test; None if it fails or takes too long. Raises
        SandboxLost, TimeoutError."""
        status, output = self._ask(test)
        return output.decode(errors="replace") if status == inside.DONE else None

    def _ask(self, message: dict[str, Any]) -> tuple[bytes, bytes]:
        self._write(json.dumps(message).encode() + b"\n")
        status, size = inside.ANSWER.unpack(self._read(inside.ANSWER.size))
        if size > inside.MAX_OUTPUT_BYTES:
            raise SandboxLost("its answer is longer than answers are")
        return status, self._read(size)

    def _write(self, content: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None, "it was started with pipes"
        rest = memoryview(content)
        while rest:
            self._wait(pipe.fileno(), select.POLLOUT)
            try:
                rest = rest[os.write(pipe.fileno(), rest[: select.PIPE_BUF]) :]
            except BrokenPipeError:
                raise SandboxLost(self._last_words()) from None

    def _read(self, size: int) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None, "it was started with pipes"
        content = bytearray()
        while len(content) < size:
            self._wait(pipe.fileno(), select.POLLIN)
            chunk = os.read(pipe.fileno(), min(_CHUNK_BYTES, size - len(content)))
            if not chunk:
                raise SandboxLost(self._last_words())
            content += chunk
        return bytes(content)

    def _wait(self, file: int, event: int) -> None:
        watch = select.poll()
        watch.register(file, event)
        if not watch.poll(max(0.0, self.deadline - time.monotonic()) * 1000):
            raise TimeoutError

    def _last_words(self) -> str:
        """Return bubblewrap's error message; inside.py writes nothing there."""
        pipe = self._process.stderr
        assert pipe is not None, "it was started with pipes"
        os.set_blocking(pipe.fileno(), False)
        return (pipe.read(1000) or b"").decode(errors="replace").strip() or "it ended"


def program_of(module: ModuleType) -> list[str]:
    """Return the words that run a module's text, which imports only the standard library."""
    return [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", inspect.getsource(module)]


def _start(way: Way) -> subprocess.Popen:
    """Start inside.py. Its only ways out are the pipes."""
    python = program_of(inside)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if not way.is_sandbox:
        return subprocess.Popen(python, env=_ENVIRONMENT, start_new_session=True, cwd="/tmp", bufsize=0, **pipes)
    command, filter_file, user = enclose(way, python)
    options: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        return subprocess.Popen(
            command, env=_ENVIRONMENT, pass_fds=[filter_file], cwd="/", bufsize=0, **pipes, **options
        )
    finally:
        os.close(filter_file)

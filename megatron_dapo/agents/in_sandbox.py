"""The first program in a command's sandbox: writes its files, runs it, and passes its connections
on to the gateway's socket.

command_process.py passes this file's text to `python -c`: it imports only the standard library. Its
order is standard input, a JSON object in a file that takes the result in its place. It knows no
secret but the command's own.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

MAX_RESULT_BYTES = 1 << 20
"""Of a result file."""

_RESULT = "/tmp/result.json"
_NOT_STARTED = 127
_CHUNK_BYTES = 1 << 16


def become(argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by a command without standard input."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {error}\n".encode(errors="replace"))
        os._exit(_NOT_STARTED)


async def _run(order: dict) -> int:
    """Run the command; return its exit code, negative after a signal."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # it would write of each connection too many
    if (path := order["socket"]) is not None:
        server = socket.create_server(("127.0.0.1", order["port"]))
        await asyncio.start_server(lambda reader, writer: _relay(path, reader, writer), sock=server)
    child = os.fork()
    if child == 0:
        become(order["argv"], order["environment"])
    ended = asyncio.Event()
    loop.add_reader(os.pidfd_open(child), ended.set)
    await ended.wait()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _relay(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes to and from the Unix socket at `path`."""
    with suppress(OSError):
        far_reader, far_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        far_writer.close()
    writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy to the end, and pass the end on."""
    with suppress(OSError):
        while chunk := await source.read(_CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
    with suppress(OSError):
        target.write_eof()


def _main() -> None:
    order = json.load(sys.stdin)
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for path, content in order["files"].items():
        place = os.path.join("/tmp", path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(content)
        os.chmod(place, 0o755)
    code = asyncio.run(_run(order))
    os.ftruncate(0, 0)
    with suppress(OSError), open(os.open(_RESULT, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as result:
        os.pwrite(0, result.read(MAX_RESULT_BYTES) or b"", 0)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _main()

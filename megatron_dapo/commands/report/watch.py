"""`report --watch`: serves the page to who has its key, on this machine, and follows the runs."""

import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_dapo.commands.report.answers import StepFile, answer_files, texts_bytes, tokens_bytes
from megatron_dapo.commands.report.attempts import attempts_of
from megatron_dapo.commands.report.embedding import packed
from megatron_dapo.commands.report.page import pack, render, summary
from megatron_dapo.commands.report.run_data import RunData, name_of, read_run, runs_in
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.storage.run_folder import RunFolder

HOST = "127.0.0.1"
_KEY_BYTES = 32
# a forwarded port is another one
_OWN_NAME = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.IGNORECASE)
_CHUNK = re.compile(r"/(?P<part>texts|tokens|logs)/(?P<run>\d{1,4})(/(?P<kind>trained|held-out)/(?P<step>\d{1,9}))?")


class Watched:
    """The followed runs, as the server presents them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._given = folders
        self.folders = runs_in(folders)
        self.page = render([name_of(folder) for folder in folders], is_live=True, chunks=())
        self._last: tuple[str, str] | None = None
        self._runs: dict[Path, tuple[str, RunData]] = {}
        self._numbered = [*self.folders]  # a run keeps its number, whichever begin beside it: pages ask by it

    def tag(self) -> str:
        """Return a tag that changes with the files of the summary, and with the runs of a folder."""
        self.folders = runs_in(self._given)
        return hashlib.sha256(repr([*map(_state, self.folders)]).encode()).hexdigest()[:32]

    def _read(self, folder: Path) -> RunData:
        """Return a run's data, read again only if its files changed."""
        state = _state(folder)
        if self._runs.get(folder, ("", None))[0] != state:
            self._runs[folder] = (state, read_run(folder))
        return self._runs[folder][1]

    def summary(self, tag: str) -> str:
        """Return the summary at this tag, packed. Raises UserError if a folder is no run any
        more."""
        last = self._last
        if last is None or last[0] != tag:
            folders = self.folders  # another page's request may change it meanwhile
            content = summary(folders, self._read)
            self._numbered += [folder for folder in folders if folder not in self._numbered]
            for run, folder in zip(content["runs"], folders, strict=True):
                run["at"] = self._numbered.index(folder)
                files = answer_files(folder)
                run["answers"] = [{"kind": file.kind, "step": file.step, "version": _version(file)} for file in files]
                run["num_answer_files"] = len(files)
            last = self._last = (tag, pack(content))
        return last[1]

    def answers(self, part: str, number: int, kind: str | None, step: int) -> str | None:
        """Return the texts or tokens of a step, packed; "" if it has none yet, None without such a
        step. Of the part "logs", return the run's attempts."""
        if number >= len(self._numbered):
            return None
        if part == "logs":
            return pack(attempts_of(self._numbered[number]))
        files = [file for file in answer_files(self._numbered[number]) if (file.kind, file.step) == (kind, step)]
        return _part(files[0], part) if files else None


def _state(folder: Path) -> str:
    run = RunFolder(folder)
    files = [run.metrics, run.config, run.machine, run.ends, run.rollouts, run.validation(0).parent]
    return repr([(str(path), _changed(path)) for path in (*files, *sorted(run.ends.glob("*.json")))])


def _part(file: StepFile, part: str) -> str:
    groups = file.groups()
    content = texts_bytes(groups) if part == "texts" else tokens_bytes(file, groups)
    return packed(content) if groups and content else ""


def _version(file: StepFile) -> str:
    """Return a version that changes with a step's files: tokens come after the texts, and a resumed
    run writes again."""
    return " ".join(f"{changed}" for changed in (_changed(file.path), file.tokens and _changed(file.tokens)) if changed)


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests with the server's key, since other users of this machine reach the port
    too. A page of another origin cannot read anything: its browser names another host."""

    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        if not _OWN_NAME.fullmatch(self.headers.get("Host", "")):
            return self._send(403, "text/plain", "This page is for browsers on this machine.")
        address = urlsplit(self.path)
        if not self.server.is_key(parse_qs(address.query).get("key", [""])[0]):
            return self._send(403, "text/plain", "The key is missing: open the address that `report --watch` prints.")
        path = address.path
        try:
            if path == "/":
                return self._send(200, "text/html", self.server.watched.page)
            if path == "/summary":
                return self._summary()
            if match := _CHUNK.fullmatch(path):
                packed = self.server.watched.answers(
                    match["part"], int(match["run"]), match["kind"], int(match["step"] or 0)
                )
                # browsers call a 404 an error
                status = 404 if packed is None else 200 if packed else 204
                return self._send(status, "text/plain", packed or "")
        except UserError as error:
            return self._send(500, "text/plain", error.report())
        return self._send(404, "text/plain", "There is no such page.")

    def _summary(self) -> None:
        tag = self.server.watched.tag()
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return self._send(304, "text/plain", "", tag)
        return self._send(200, "text/plain", self.server.watched.summary(tag), tag)

    def _send(self, status: int, kind: str, text: str, tag: str = "") -> None:
        content = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests: their addresses hold the key."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, watched: Watched) -> None:
        super().__init__((HOST, port), _Handler)
        self.watched = watched
        self._key = secrets.token_urlsafe(_KEY_BYTES)

    @property
    def url(self) -> str:
        """Return the address of the page, with its key."""
        return f"http://{HOST}:{self.server_port}/?key={self._key}"

    def is_key(self, text: str) -> bool:
        """Return whether a request has the key, in constant time."""
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._key.encode("ascii"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a lost browser: its tab was closed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(folders: Sequence[Path], port: int) -> _Server:
    """Return the listening server.

    Raises UserError if a folder is no run, or the port is taken.
    """
    watched = Watched(folders)
    watched.summary(watched.tag())
    try:
        return _Server(port, watched)
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} cannot be used ({error}); choose another --port.") from error


def watch(folders: Sequence[Path], port: int) -> None:
    """Serve the page of these runs until Ctrl-C. Raises UserError."""
    server = make_server(folders, port)
    print_line(f"{server.url} follows {', '.join(map(str, folders))}; end it with Ctrl-C.")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print_line("")
    finally:
        server.server_close()

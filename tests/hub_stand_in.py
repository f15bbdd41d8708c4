"""A stand-in of the Hugging Face Hub: the HTTP API that huggingface_hub uses to make a repository
and to commit files to it, small ones in the commit, weights over git-lfs."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Hub:
    """The state of the hub, and its refusals."""

    token: str
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """Of the repository, by path."""
    weights_mode: str = "lfs"
    """How weights are to come: over git-lfs, or "regular" in the commit like the small files."""
    is_private: bool | None = None
    requests: list[str] = field(default_factory=list)
    refuses: str = ""
    """A part of the address of requests that it answers with an error."""
    is_silent: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    _blobs: dict[str, bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes) -> object:
        """Return the JSON of an answer; None for a file that was received."""
        if path == "/api/repos/create":
            wish = json.loads(body)
            self.is_private = wish.get("visibility") == "private"
            return {"url": f"{self.url}/{wish.get('organization') or 'me'}/{wish['name']}"}
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return {"warnings": [], "errors": []}
        if "/tree/" in path:
            return [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.files]
        if "/preupload/" in path:
            modes = {True: self.weights_mode, False: "regular"}
            return {
                "files": [
                    {**entry, "uploadMode": modes[entry["path"].endswith(".safetensors")], "shouldIgnore": False}
                    for entry in json.loads(body)["files"]
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            return {"objects": [self._upload(wish) for wish in json.loads(body)["objects"]]}
        if path.startswith("/blobs/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/blobs/")
            self._blobs[path.removeprefix("/blobs/")] = body
            return None
        assert "/commit/" in path, path
        self._commit([json.loads(line) for line in body.splitlines()])
        return {"commitUrl": f"{self.url}/me/model/commit/0a1b2c", "commitOid": "0a1b2c"}

    def _upload(self, wish: dict) -> dict:
        return {**wish, "actions": {"upload": {"href": f"{self.url}/blobs/{wish['oid']}"}}}

    def _commit(self, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self._blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]


@contextmanager
def running_hub(token: str) -> Iterator[Hub]:
    """Run a hub that takes only this token."""
    hub = Hub(token)

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {self.path}")
            if hub.is_silent:
                hub.released.wait(30)
                return
            is_known = path.startswith("/blobs/") or self.headers.get("Authorization") == f"Bearer {hub.token}"
            if not is_known or (hub.refuses and hub.refuses in path):
                return self._send(401 if not is_known else 403, {"error": "You may not do that."})
            self._send(200, hub.answer(self.command, path, body))

        do_GET = do_POST = do_PUT = handle_one

        def _send(self, code: int, content: object) -> None:
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)

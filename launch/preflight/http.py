"""HTTP from the trainer nodes to the server nodes, at the ports that the servers will have."""

import threading
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from megatron_dapo.servers.server_health import http_get
from megatron_dapo.storage.server_key import CURE, key_header

PATIENCE_S = 15.0


class Listener:
    """Answers every GET with the token, until it is closed."""

    def __init__(self, host: str, port: int, token: str) -> None:
        """Listen at the host and the port. Port 0 means a free one. Raise OSError on failure."""
        self._server = ThreadingHTTPServer((host, port), _handler(token))
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(token.encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def fault(url: str, token: str | None, key: str | None = None, timeout_s: float = PATIENCE_S) -> str | None:
    """Return why a GET of `url` does not answer with the token, or None. token None: any answer is
    good, unless it demands another key. Goes through no proxy, like the controller's own requests.
    """
    try:
        answer = http_get(url, key_header(key), timeout_s)
    except OSError as error:
        return " ".join(str(error).split()) or type(error).__name__
    if answer.status in (401, 403):
        return f"{'refuses the key that it was sent' if key else 'demands a key'}; {CURE}"
    return None if token in (None, answer.body.decode(errors="replace")) else "something else answers there"


def find_culprits(failed: Collection[tuple[int, int]], trainers: Collection[int], servers: Collection[int]) -> set[int]:
    """Return the culprits of failed (trainer, server) pairs: servers that no trainer reaches, and
    for the other pairs the trainer."""
    unreached = {server for server in servers if all((trainer, server) in failed for trainer in trainers)}
    if len(servers) > 1 and unreached == set(servers) and len(trainers) == 1:
        return set(trainers)  # it reaches none of several
    return unreached | {trainer for trainer, server in failed if server not in unreached}

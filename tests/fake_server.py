"""A stand-in for an SGLang server that starts at once: python fake_server.py HOST PORT BEHAVIOUR."""

import http.server
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    answers: Path | None = None  # a JSON file: route -> status, none = no answer at all

    def do_GET(self) -> None:
        statuses = {"/ready": 200} | (json.loads(self.answers.read_text()) if self.answers else {})
        status = statuses.get(self.path, 404)
        if status is None:
            time.sleep(600)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main(host: str, port: str, behaviour: str) -> None:
    print(f"fake server: {behaviour}", flush=True)
    if behaviour == "dies":
        sys.exit("out of luck")
    if behaviour == "hangs":
        time.sleep(600)
    if behaviour == "has a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(f"child {child.pid}", flush=True)
    if behaviour.startswith("answers "):
        Handler.answers = Path(behaviour.removeprefix("answers "))
    if behaviour == "leaves files":
        # as SGLang's processes: open until they end, and removed by nobody
        tempfile.NamedTemporaryFile(delete=False)
        shared = open(f"/dev/shm/sglang_loads_{os.getpid()}.shm", "w")
        print(f"files {tempfile.gettempdir()} {shared.name}", flush=True)
    http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])

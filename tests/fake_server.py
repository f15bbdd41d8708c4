"""A stand-in for an SGLang server that starts at once:
python fake_server.py HOST PORT BEHAVIOUR [further words, of a server over several nodes]."""

import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLASSIFY_S = 0.03


class Handler(http.server.BaseHTTPRequestHandler):
    answers: Path | None = None  # a JSON file: route -> status; None: no answer at all
    notes: Path | None = None  # the classified texts, one per line

    def do_GET(self) -> None:
        statuses = {"/ready": 200} | (json.loads(self.answers.read_text()) if self.answers else {})
        status = statuses.get(self.path, 404)
        if status is None:
            time.sleep(600)
        self.send_response(status)
        self.end_headers()

    def do_POST(self) -> None:
        """Classify: a text's score is its first token times 1000 and its last one.
        Answers are noted."""
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
        time.sleep(CLASSIFY_S)
        body = json.dumps([{"embedding": [1000.0 * text[0] + text[-1]]} for text in texts]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.notes is not None:
            with self.notes.open("a") as file:
                file.write("".join(f"{json.dumps(text)}\n" for text in texts))

    def log_message(self, *_: object) -> None:
        pass


def main(host: str, port: str, behaviour: str, *_: str) -> None:
    print(f"fake server: {behaviour}", flush=True)
    if behaviour == "dies":
        sys.exit("out of luck")
    if behaviour == "hangs":
        time.sleep(600)
    if behaviour == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "has a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(f"child {child.pid}", flush=True)
    if behaviour.startswith("answers "):
        Handler.answers = Path(behaviour.removeprefix("answers "))
    if behaviour.startswith("classifies "):
        Handler.notes = Path(behaviour.removeprefix("classifies "))
    if behaviour == "leaves files":
        # as SGLang's processes: open until they end, and removed by nobody
        tempfile.NamedTemporaryFile(delete=False)
        shared = open(f"/dev/shm/sglang_loads_{os.getpid()}.shm", "w")
        print(f"files {tempfile.gettempdir()} {shared.name}", flush=True)
    http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A headless Chromium for tests, steered through a pipe by its own protocol: no port, no driver,
no package."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: `make setup-browser` installs one (Debian, as root)"
)
# no activity of its own
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--hide-scrollbars",
)
_WAIT_S = 60.0


class Browser:
    """One tab. requests: addresses that it asked for;
    errors: complaints of its console and scripts."""

    def __init__(self, profile: Path) -> None:
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()
        wired = ("bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}')
        options = ("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank")
        assert CHROMIUM is not None, "no Chromium is installed"
        self._process = subprocess.Popen(
            [*wired, CHROMIUM, *_QUIET, *options],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._in, self._out = to_us, from_us
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        targets = self.command("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict:
        """Return the answer to a command of the protocol. AssertionError if it fails."""
        number = next(self._numbers)
        message: dict = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> dict:
        deadline = time.monotonic() + _WAIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, f"Chromium did not answer for {_WAIT_S:g} s, or ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, what: dict) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"].get("exception", what["exceptionDetails"])))
        elif event == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.errors.append(str(what["args"]))
        elif event == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(what["entry"]["text"])

    def open(self, address: str, width: int = 1400, height: int = 900) -> None:
        """Go to a page and wait until it has shown its answers."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.command("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && document.getElementById('status')?.textContent")

    def do(self, script: str) -> Any:
        """Return the value of a script, or of its promise. AssertionError if it raises."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return a script's first value other than false."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            if value := self.do(condition):
                return value
            assert time.monotonic() < deadline, f"it never came to: {condition}"
            time.sleep(0.05)

    def choose(self, css: str, value: str) -> None:
        """Set a control as a user does."""
        script = f"(c => {{ c.value = {json.dumps(value)}; c.dispatchEvent(new Event('input', {{bubbles: true}}));"
        self.do(f"{script} c.dispatchEvent(new Event('change', {{bubbles: true}})); }})({_found(css)})")

    def click(self, css: str) -> None:
        self.do(f"{_found(css)}.click()")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.command("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def texts(self, css: str) -> list[str]:
        """Return the texts of the elements that match."""
        return self.do(f"[...document.querySelectorAll({json.dumps(css)})].map(e => e.textContent)")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._session = None
        try:
            self.command("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


def _found(css: str) -> str:
    return f"document.querySelector({json.dumps(css)})"


def status(page: Browser, *parts: str) -> str:
    """Return the line of the report's viewer, once it has these parts."""
    conditions = "".join(f" && t.includes({json.dumps(part)})" for part in parts)
    return page.wait_for(f"(t => t{conditions} && t)(document.getElementById('status').textContent)")

"""A page in headless Chromium, controlled by the DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processes import wait_until

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
"""Chromium's path, if it is on this machine."""
FLAGS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root, and the page is ours
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Page:
    """The only page of a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._received = b""
        self._calls = 0
        self._session = ""
        self.errors: list[str] = []
        """Exceptions that the page's scripts did not catch."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Runtime.enable")

    def open(self, url: str, *, width: int = 1280) -> None:
        """Load a page, and wait until its scripts have run."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **screen)
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        wait_until(lambda: self.run(condition))

    def screenshot(self, path: Path) -> None:
        """Write a PNG of what is visible, for a person to look at."""
        answer = self._call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._from_browser, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with its files in `folder`, and yield a page."""
    commands_read, commands_write = os.pipe()
    answers_read, answers_write = os.pipe()
    script = f'exec "$0" "$@" 3<&{commands_read} 4>&{answers_write}'
    assert PROGRAM is not None
    process = subprocess.Popen(
        ["bash", "-c", script, PROGRAM, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(commands_read, answers_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands_read)
    os.close(answers_write)
    try:
        yield Page(commands_write, answers_read)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(commands_write)
        os.close(answers_read)

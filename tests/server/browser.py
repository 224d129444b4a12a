"""A headless Chromium, told what to do through a pair of pipes: no driver is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._count = write, read, b"", 0
        self.errors: list[str] = []  # of scripts of the page
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> Any:
        return self._call(method, params)

    def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded":
                entry = answer["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} {entry.get('url')}")

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def run(self, script: str) -> Any:
        """The value of some JavaScript."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30) -> Any:
        """Wait until some JavaScript is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never came: {script}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    assert PROGRAM is not None
    to_read, write = os.pipe()
    read, to_write = os.pipe()
    script = 'exec "$@" 3<&"$READ" 4>&"$WRITE"'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu",
         "--disable-dev-shm-usage", "--remote-debugging-pipe", "--window-size=1200,760",
         f"--user-data-dir={folder}"],
        pass_fds=(to_read, to_write),
        env=os.environ | {"READ": str(to_read), "WRITE": str(to_write), "HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(to_write)
    try:
        page = Browser(write, read)
        yield page
        with contextlib.suppress(AssertionError, OSError):
            page._session = None
            page.call("Browser.close")
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)

"""Drive a headless Chromium over a pipe with its DevTools protocol; needs no further package."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13,
        "Escape": 27, "Home": 36, "+": 187, "-": 189}  # fmt: skip
# Chromium reads its commands from file 3 and writes to file 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 60.0  # seconds


def find_chromium() -> str | None:
    """The path of a Chromium, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `errors` and `requests` hold what the page logged or threw, and what it fetched."""

    def __init__(self, chromium: str, profile: Path, width: int = 1200, height: int = 700):
        ours, theirs = os.pipe(), os.pipe()
        self.errors: list[Any] = []
        self.requests: list[str] = []
        self.number = 0
        self.rest = b""
        self.session: str | None = None
        to_browser, from_browser = (_high(fd) for fd in (ours[0], theirs[1]))
        self.write, self.read = ours[1], theirs[0]
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            "--no-first-run", "--disable-dev-shm-usage", "--force-color-profile=srgb",
            f"--window-size={width},{height}", f"--user-data-dir={profile}",
        ]  # fmt: skip
        command = [sys.executable, "-c", _LAUNCH, str(to_browser), str(from_browser), chromium]
        self.process = subprocess.Popen(
            [*command, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def close(self) -> None:
        """End the browser."""
        self.session = None
        self.call("Browser.close")
        self.process.wait(_PATIENCE)
        os.close(self.write)
        os.close(self.read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self.number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def open(self, path: Path) -> None:
        """Load a page from a file, and wait until it is there."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The first true value of an expression."""
        until = time.monotonic() + _PATIENCE
        while not (found := self.value(expression)):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.02)
        return found

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One of mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 * shift,
                windowsVirtualKeyCode=KEYS[key],
            )  # fmt: skip

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.read, 1 << 16)
            assert more, f"the browser ended with status {self.process.wait()}"
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(params["args"])
            case "Log.entryAdded":
                self.errors.append(params["entry"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return message


def _high(fd: int) -> int:
    """The same file under a number that is neither 3 nor 4."""
    found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return found

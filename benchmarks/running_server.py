"""A server beside a benchmark, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_SECONDS = 600.0


class RunningServer:
    """A server that this process started.

    Attributes:
        port: where it listens, at 127.0.0.1.
        process: of the supervisor and the API.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    async def wait_ready(self) -> None:
        """Wait until it takes requests. RuntimeError if it does not come to that."""
        end = time.monotonic() + START_SECONDS
        while await self.get("/ready") is None:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server does not start")
            await asyncio.sleep(0.2)

    async def get(self, path: str) -> Any:
        """What it tells in JSON; None if it does not answer."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(
                b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode()
            )
            whole = await reader.read()
            writer.close()
            answer, _, body = whole.partition(b"\r\n\r\n")
            if b" 200 " in answer:
                return json.loads(body)
        return None


@contextlib.contextmanager
def running_server(model: str | Path, *options: str) -> Iterator[RunningServer]:
    """Run `tbo-jax serve` with a free port and some more options; it may not be ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tbo_jax.cli.main", "serve", str(model), "--port", str(port),
            "-q", *options,
        ]
    )  # fmt: skip
    try:
        yield RunningServer(process, port)
    finally:
        process.terminate()
        process.wait()

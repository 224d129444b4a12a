"""`tbo-jax serve` as a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.engine.engines import wait_for


def command(model: Path | str, *options: str) -> list[str]:
    return [sys.executable, "-m", "tbo_jax.cli.main", "serve", str(model), *options]


@contextlib.contextmanager
def served(
    model: Path | str, log: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server's process, and its address once it answers; it is killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cache = log.parent / "cache"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command(model, "--port", str(port), *options),
            stderr=written,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{address}/ready", timeout=5).status_code == 200
        return False

    try:
        wait_for(answers)
        yield process, address
    finally:
        process.kill()
        process.wait()

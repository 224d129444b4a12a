"""Time between the pieces of streams, while long prompts and chats come or not.

    python benchmarks/latency.py [--streams 32] [--tokens 200] [--stream-interval S] [--json FILE]

Each round has two parts. In both, streams run side by side, and each piece is stamped as it comes.
In the second, other clients send prompts and chats of 1 MB without a pause: the server has to
tokenize them, and to render a template for each chat, before it can tell that they are too long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import jax
import tyro
from running_server import RunningServer, running_server
from serve import MODEL, PROMPTS, post

from tbo_jax.server.settings import ServerSettings

LONG = 2**20  # bytes of a prompt that disturbs


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/latency.py."""

    model: str = str(MODEL)
    """Folder of a checkpoint."""
    streams: int = 32
    """Requests at a time, each a row of a step."""
    tokens: int = 200
    """Of each stream."""
    disturbers: int = 2
    """Clients that send long prompts and chats, one after the other each."""
    stream_interval: float = ServerSettings.stream_interval
    """Option of the server."""
    rounds: int = 5
    """Of which medians are told."""
    json: Path | None = None
    """Write the results there too."""


async def stream(port: int, body: bytes) -> list[float]:
    """When each piece came, of a stream that is read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head:
        raise RuntimeError(f"a stream was answered with {head[:200]!r}")
    times = []
    last = b""
    while data := await reader.read(1 << 16):
        times.append(time.perf_counter())
        last = (last + data)[-100:]
    if b"[DONE]" not in last:
        raise RuntimeError(f"a stream ended with {last!r}")
    writer.close()
    return times


async def disturb(port: int, number: int) -> None:
    """Send a long prompt and a long chat by turns, until it is cancelled."""
    text = "and it came to pass in those days " * (LONG // 34)
    bodies = [
        ("/v1/completions", {"prompt": text, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ]
    requests = [(path, json.dumps(body).encode()) for path, body in bodies]
    while True:
        path, body = requests[number % len(requests)]
        number += 1
        status, answer = await post(port, body, path=path)
        if status != 400:
            raise RuntimeError(f"a long prompt was answered with {status}: {answer[:200]!r}")


async def gaps(args: Arguments, port: int, is_disturbed: bool) -> list[float]:
    """Seconds between the pieces of all streams, sorted."""
    bodies = [
        json.dumps(
            {"prompt": f"{PROMPTS[i % len(PROMPTS)]} {i}", "max_tokens": args.tokens,
             "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        for i in range(args.streams)
    ]  # fmt: skip
    disturbing = [
        asyncio.create_task(disturb(port, number))
        for number in range(args.disturbers * is_disturbed)
    ]
    try:
        times = await asyncio.gather(*(stream(port, body) for body in bodies))
    finally:
        for task in disturbing:
            task.cancel()
        results = await asyncio.gather(*disturbing, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return sorted(b - a for one in times for a, b in itertools.pairwise(one))


async def measure(args: Arguments, server: RunningServer) -> dict[str, list[tuple[float, float]]]:
    """Median and 99th percentile of each round in seconds, calm and disturbed."""
    await server.wait_ready()
    await gaps(args, server.port, False)
    found: dict[str, list[tuple[float, float]]] = {"calm": [], "disturbed": []}
    for _ in range(args.rounds):
        for name in found:
            all_gaps = await gaps(args, server.port, name == "disturbed")
            found[name].append((statistics.median(all_gaps), all_gaps[int(len(all_gaps) * 0.99)]))
    return found


def main(args: Arguments) -> None:
    """Print the figures."""
    options = ["--max-sequences", str(args.streams), "--no-prefix-cache"]
    options += ["--stream-interval", str(args.stream_interval)]
    with running_server(args.model, *options) as server:
        found = asyncio.run(measure(args, server))
    print(
        f"{args.streams} streams of {args.tokens} tokens, {os.cpu_count()} cores of "
        f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}; "
        "milliseconds between pieces, median and p99 (medians of rounds)"
    )
    for name, rounds in found.items():
        median, p99 = (statistics.median(figures) * 1e3 for figures in zip(*rounds, strict=True))
        print(f"{name}: {median:.1f} and {p99:.1f}; {p99 / median:.2f} x")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))

"""Load a server with many requests while clients leave, send rubbish, and its engine is killed.

    python benchmarks/serve.py --requests 100000 --kills 20 --json soak.json
    python benchmarks/serve.py --requests 2000 --leave 0 --malformed 0 --kills 0     # throughput

It starts `tbo-jax serve` on this machine. Requests are drawn from a list of different ones, greedy
and seeded, streamed and whole, with random options. What each gives is learned first, one by one.
Then every answer is compared with that, so that a token that is lost or told twice is found. At the
end no page of the cache may be in use. Exit status 1 if anything was not as it should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import tyro
from running_server import RunningServer, running_server

from tbo_jax.host.progress import progress_bar

MODEL = Path(__file__).resolve().parents[1] / "examples" / "kjv-moe"
PROMPTS = (
    "In the beginning God", "And Jesus said unto them,", "Blessed is the man that", "Thus saith",
    "And it came to pass in those days, that", "The LORD is my shepherd;", "Now the sons of",
)  # fmt: skip
MALFORMED = (
    b"{", b"[]", b"null", b'{"model": 7}', b"\xff\xfe{}", b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "no_such_field": 1}', b"[" * 5000, b'{"prompt": "a", "max_tokens": -1}',
)  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/serve.py."""

    requests: int = 2000
    """Requests in all."""
    clients: int = 64
    """Clients that send them, one after the other each."""
    kinds: int = 200
    """How many different requests there are."""
    leave: float = 0.2
    """Part of the streams that is left early."""
    malformed: float = 0.05
    """Part of the requests that is rubbish."""
    kills: int = 0
    """How often the engine's process is killed meanwhile."""
    api_workers: int = 1
    """Processes of the API."""
    seed: int = 0
    """Of what is drawn."""
    json: Path | None = None
    """Write the results there too."""


@dataclass
class Counts:
    """What became of the requests."""

    answered: int = 0
    left: int = 0
    refused: int = 0  # rubbish, as it should be
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)  # of those that were answered
    kills: int = 0


def request_of(rng: random.Random, model: str) -> dict[str, Any]:
    """A request whose answer does not depend on when it is asked."""
    wanted: dict[str, Any] = {
        "model": model, "prompt": rng.choice(PROMPTS), "max_tokens": rng.randint(1, 48),
        "temperature": rng.choice([0, 0, 0.7, 1.2]), "seed": rng.randint(0, 2**31),
    }  # fmt: skip
    for chance, option in (
        (0.2, {"stop": ["the", ";"]}),
        (0.2, {"frequency_penalty": round(rng.uniform(-1, 1), 2)}),
        (0.1, {"logit_bias": {str(rng.randint(300, 900)): 3}}),
        (0.1, {"n": 2}),
        (0.1, {"top_p": 0.9}),
        (0.1, {"structured_outputs": {"regex": "[a-z ]{10,40}"}}),
    ):
        if rng.random() < chance:
            wanted |= option
    return wanted


async def post(
    port: int, body: bytes, leave_after: int | None = None, path: str = "/v1/completions"
) -> tuple[int, bytes]:
    """Status and body of an answer; with `leave_after` only so many bytes of it are read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(body))
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if leave_after is not None:
            await reader.read(leave_after)
            return status, b""
        if b"transfer-encoding: chunked" not in head.lower():
            return status, await reader.read()
        whole = b""
        while size := int(await reader.readline(), 16):
            whole += (await reader.readexactly(size + 2))[:-2]
        return status, whole
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def texts_of(body: bytes, streamed: bool) -> dict[int, tuple[str, str]]:
    """By choice its text and why it ended. ValueError if one ends twice or not at all."""
    if not streamed:
        choices = json.loads(body)["choices"]
        return {one["index"]: (one["text"], one["finish_reason"]) for one in choices}
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if lines[-1:] != [b"[DONE]"]:
        raise ValueError(f"a stream ended with {body[-80:]!r}")
    text: dict[int, str] = {}
    ends: dict[int, str] = {}
    for line in lines[:-1]:
        for one in json.loads(line).get("choices", ()):
            index = one["index"]
            if index in ends:
                raise ValueError(f"choice {index} goes on after its end")
            text[index] = text.get(index, "") + one["text"]
            if one["finish_reason"] is not None:
                ends[index] = one["finish_reason"]
    if ends.keys() != text.keys():
        raise ValueError("a choice has no end")
    return {index: (text[index], ends[index]) for index in text}


class Soak:
    """A server under load."""

    def __init__(self, args: Arguments, process: subprocess.Popen[bytes], port: int) -> None:
        self.args = args
        self.port = port
        self.counts = Counts()
        self.memory: list[dict[str, float]] = []  # MiB by process, over time
        self._process = process
        self._rng = random.Random(args.seed)
        self._kinds = [request_of(self._rng, str(MODEL)) for _ in range(args.kinds)]
        self._known: list[dict[int, tuple[str, str]]] = []
        self._left = args.requests

    async def learn(self) -> None:
        """Ask for each kind of request once, with nothing else under way."""
        for kind in self._kinds:
            status, body = await post(self.port, json.dumps(kind).encode())
            if status != 200:
                raise RuntimeError(f"{kind} was answered with {status}: {body[:200]!r}")
            self._known.append(texts_of(body, streamed=False))

    async def run(self, progress: Any) -> float:
        """Send all requests; seconds that it took."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.args.clients):
                group.create_task(self._client(progress))
            watching = group.create_task(self._watch())
            group.create_task(self._finish(watching))
        return time.perf_counter() - start

    async def _finish(self, watching: asyncio.Task[None]) -> None:
        while self._done < self.args.requests:
            await asyncio.sleep(0.1)
        watching.cancel()

    @property
    def _done(self) -> int:
        counts = self.counts
        return counts.answered + counts.left + counts.refused + len(counts.wrong)

    async def _client(self, progress: Any) -> None:
        while self._left > 0:
            self._left -= 1
            try:
                await self._ask()
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.counts.wrong.append(f"{type(error).__name__}: {error}")
            progress(self._done, self.args.requests)

    async def _ask(self) -> None:
        rng, counts = self._rng, self.counts
        if rng.random() < self.args.malformed:
            status, body = await post(self.port, rng.choice(MALFORMED))
            if 400 <= status < 500 and "error" in json.loads(body):
                counts.refused += 1
            else:
                counts.wrong.append(f"rubbish was answered with {status}: {body[:100]!r}")
            return
        number = rng.randrange(len(self._kinds))
        streamed = rng.random() < 0.7
        body = json.dumps(self._kinds[number] | {"stream": streamed}).encode()
        if streamed and rng.random() < self.args.leave:
            await post(self.port, body, leave_after=rng.randint(1, 600))
            counts.left += 1
            return
        start = time.perf_counter()
        status, answer = await post(self.port, body)
        while status == 429:
            await asyncio.sleep(1.0)
            status, answer = await post(self.port, body)
        if status != 200:
            counts.wrong.append(
                f"{self._kinds[number]} was answered with {status}: {answer[:200]!r}"
            )
            return
        found, expected = texts_of(answer, streamed), self._known[number]
        if found != expected:
            counts.wrong.append(f"{self._kinds[number]} gave {found}, expected {expected}")
            return
        counts.answered += 1
        counts.seconds.append(time.perf_counter() - start)
        counts.tokens += sum(len(text) for text, _ in found.values())

    async def _watch(self) -> None:
        """Kill the engine from time to time, and note how much memory each process has."""
        kill_at = [
            (number + 1) * self.args.requests // (self.args.kills + 1)
            for number in range(self.args.kills)
        ]
        while True:
            await asyncio.sleep(0.25)
            if kill_at and self._done >= kill_at[0] and (engines := self.processes("engine_")):
                kill_at.pop(0)
                os.kill(engines[0], signal.SIGKILL)
                self.counts.kills += 1
            self.memory.append(
                {
                    name: sum(map(resident, pids))
                    for name, pids in (
                        ("engine", self.processes("engine_")),
                        ("api", [self._process.pid, *self.processes("api_")]),
                    )
                }
            )

    def processes(self, name: str) -> list[int]:
        """Ids of the server's processes of a kind."""
        found = subprocess.run(
            ["pgrep", "-P", str(self._process.pid), "-f", f"tbo_jax.server.{name}process"],
            capture_output=True,
            text=True,
        )
        return list(map(int, found.stdout.split()))


def resident(pid: int) -> float:
    """MiB of memory that a process has."""
    with contextlib.suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


async def soak(args: Arguments, server: RunningServer) -> dict[str, Any]:
    """Put the server under load; what came of it."""
    await server.wait_ready()
    load = Soak(args, server.process, server.port)
    await load.learn()
    with progress_bar("requests", sys.stderr.isatty()) as update:
        seconds = await load.run(update)
    idle: dict[str, Any] = {}
    for _ in range(200):  # those that were left end within a step
        idle = await server.get("/stats") or {}
        if idle and idle["running"] == idle["waiting"] == 0:
            break
        await asyncio.sleep(0.1)
    counts = load.counts
    leaked = idle["pages"] - idle["free_pages"]
    quarter = max(1, len(load.memory) // 4)
    memory = {
        f"{name}_mib_{part}": round(statistics.median(one[name] for one in some), 1)
        for part, some in (("first", load.memory[:quarter]), ("last", load.memory[-quarter:]))
        for name in ("engine", "api")
    }
    latency = sorted(counts.seconds)
    return {
        "requests": args.requests, "clients": args.clients, "api_workers": args.api_workers,
        "answered": counts.answered, "left": counts.left, "refused": counts.refused,
        "wrong": len(counts.wrong), "first_wrong": counts.wrong[:3], "kills": counts.kills,
        "leaked_pages": leaked, "seconds": round(seconds, 2),
        "requests_per_second": round(args.requests / seconds, 1),
        "characters_per_second": round(counts.tokens / seconds),
        "median_seconds": round(latency[len(latency) // 2], 4) if latency else None,
        "p99_seconds": round(latency[int(len(latency) * 0.99)], 4) if latency else None,
        **memory,
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "jax": jax.__version__,
    }  # fmt: skip


def main(args: Arguments) -> int:
    """Run it; the exit status."""
    workers = str(args.api_workers)
    with running_server(MODEL, "--max-context", "256", "--api-workers", workers) as server:
        found = asyncio.run(soak(args, server))
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(bool(found["wrong"] or found["leaked_pages"] or server.process.returncode))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))

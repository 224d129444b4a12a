"""Time what one API process of a server carries, with the device's work as constants.

    python benchmarks/api.py [--clients 256] [--seconds 10] [--path /v1/completions] [--json FILE]

The engine's process is that of benchmarks/engine_process.py, the API process that of a server, on a
core of its own. Clients and engine have the other cores. First each client has one stream after the
other, then whole answers. A client reads every few milliseconds what came and only counts it, so
that it takes little of the machine. Needs Linux.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import engine_process
import httpx
import tyro

from tbo_jax.server.hosting import Serving
from tbo_jax.server.run import listen
from tbo_jax.server.settings import ServerSettings

TOKEN = b" wi"  # the text of the token that each step gives
READ_SECONDS = 0.01
WARM_SECONDS = 3.0
START_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/api.py."""

    clients: int = 256
    """Streams, or requests, at a time."""
    seconds: float = 10.0
    """How long each of the two is counted."""
    path: str = "/v1/completions"
    """Where streams are asked for, or /v1/chat/completions."""
    answer_tokens: int = 16
    """Tokens of a whole answer."""
    json: Path | None = None
    """Write the results there too."""


class Clients:
    """Connections that ask again and again, and count what comes."""

    def __init__(self, address: tuple[str, int], count: int, path: str, body: Any) -> None:
        content = json.dumps(body).encode()
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        # What ends an answer: the last chunk of a stream, or the last brace of a whole one.
        self._end = b"0\r\n\r\n" if body.get("stream") else b"}}"
        self.counts = {"tokens": 0, "events": 0, "answers": 0}
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            end = socket.create_connection(address)
            self._selector.register(end, selectors.EVENT_READ)
            end.sendall(self._request)

    def run(self, seconds: float) -> None:
        """Read for so long."""
        counts, end = self.counts, time.perf_counter() + seconds
        while time.perf_counter() < end:
            time.sleep(READ_SECONDS)
            for key, _ in self._selector.select(0):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 20)
                if not data:
                    raise RuntimeError("the server closed a connection")
                counts["tokens"] += data.count(TOKEN)
                counts["events"] += data.count(b"data: ")
                if data.endswith(self._end):
                    counts["answers"] += 1
                    connection.sendall(self._request)

    def close(self) -> None:
        """Leave."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: tuple[str, int], pid: int, args: Arguments) -> dict[str, float]:
    """Streams, then whole answers: what came a second, and what it took of the API's core."""
    chat = args.path.endswith("chat/completions")
    what = {"messages": [{"role": "user", "content": "In"}]} if chat else {"prompt": "In the"}
    common = {"model": "model", "ignore_eos": True, "temperature": 0, **what}
    found = {}
    for name, body in (
        ("streamed", common | {"stream": True, "max_tokens": 3500}),
        ("whole", common | {"max_tokens": args.answer_tokens}),
    ):
        clients = Clients(address, args.clients, args.path, body)
        clients.run(WARM_SECONDS)
        before, used, start = dict(clients.counts), _cpu_seconds(pid), time.perf_counter()
        clients.run(args.seconds)
        spent = time.perf_counter() - start
        found[f"{name}_core"] = (_cpu_seconds(pid) - used) / spent
        for kind, count in clients.counts.items():
            found[f"{name}_{kind}"] = (count - before[kind]) / spent
        clients.close()
        time.sleep(1.0)  # what ran is dropped
    return found


def _start_api(engine: str, listening: socket.socket) -> subprocess.Popen[bytes]:
    core = max(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tbo_jax.server.api_process",
         str(listening.fileno()), str(os.getpid())],
        stdin=subprocess.PIPE,
        pass_fds=[listening.fileno()],
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    assert process.stdin is not None
    template = Path(engine).with_name("template")
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    settings = ServerSettings(chat_template=template)
    with process.stdin as pipe:
        pipe.write(pickle.dumps(Serving("model", settings, engine=engine, quiet=True)))
    return process


def main(args: Arguments) -> None:
    """Print the figures."""
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()[:2]
    others = os.sched_getaffinity(0) - {max(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/engine"
        command = [sys.executable, engine_process.__file__]
        engine = subprocess.Popen(
            [*command, "--rows", str(args.clients), "--engine-at", path],
            preexec_fn=lambda: os.sched_setaffinity(0, others or os.sched_getaffinity(0)),
        )
        api = _start_api(path, listening)
        try:
            url = f"http://{address[0]}:{address[1]}/ready"
            httpx.get(url, timeout=START_SECONDS).raise_for_status()
            os.sched_setaffinity(0, others or os.sched_getaffinity(0))
            found = measure(address, api.pid, args)
        finally:
            for process in (api, engine):
                process.kill()
                process.wait()
            listening.close()
    engine_process.print_figures(f"{args.clients} clients", found, args.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))

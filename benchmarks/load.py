"""Time a server against `LLM.generate` on the same requests, streamed and whole.

    python benchmarks/load.py [--requests 400] [--clients 64] [--tokens 64] [--json FILE]

`tbo-jax serve` runs beside this process, with the options of the engine that `LLM` has. In each
round `LLM.generate` runs all requests, then clients ask for them as streams, then as whole answers.
Client, API and engine share the machine, which `LLM.generate` has for itself. Therefore the client
is cheap: one thread reads every few milliseconds what came, and looks only for what ends an answer.
Texts are compared with those of `LLM` when the time is taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import selectors
import socket
import statistics
import time
from pathlib import Path

import jax
import tyro
from running_server import running_server
from serve import MODEL, PROMPTS, texts_of

from tbo_jax import LLM, SamplingParams
from tbo_jax.server.settings import ServerSettings

READ_SECONDS = 0.02
END = b"0\r\n\r\n"  # the last chunk of a stream


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/load.py."""

    model: str = str(MODEL)
    """Folder of a checkpoint."""
    requests: int = 400
    """In each round, each of another prompt."""
    clients: int = 64
    """Requests at a time."""
    tokens: int = 64
    """Of each answer."""
    max_sequences: int = 16
    """Rows of a step."""
    stream_interval: float = ServerSettings.stream_interval
    """Option of the server."""
    rounds: int = 3
    """Of which medians are told."""
    json: Path | None = None
    """Write the results there too."""


class Client:
    """A connection that asks for one answer after the other."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.parts: list[bytes] = []
        self.number = -1  # of the request under way
        self._left = -1  # bytes of a whole answer that are to come
        self._tail = b""

    def ask(self, number: int, request: bytes) -> None:
        """Send a request."""
        self.number, self.parts, self._left, self._tail = number, [], -1, b""
        self.socket.sendall(request)

    def read(self, streamed: bool) -> bool:
        """Take what came; whether the answer is whole."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise RuntimeError("the server closed a connection")
        self.parts.append(data)
        if streamed:
            self._tail = (self._tail + data)[-len(END) :]
            return self._tail == END
        if self._left < 0:
            head, mark, body = b"".join(self.parts).partition(b"\r\n\r\n")
            if not mark:
                return False
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._left = int(length) - len(body)
        else:
            self._left -= len(data)
        return self._left == 0


def ask_all(
    address: tuple[str, int], requests: list[bytes], clients: int, streamed: bool
) -> tuple[float, list[bytes]]:
    """Seconds until all are answered, and the answers as they came."""
    found = [b""] * len(requests)
    with selectors.DefaultSelector() as selector:
        todo = iter(enumerate(requests))
        connections = [Client(address) for _ in range(min(clients, len(requests)))]
        start = time.perf_counter()
        for client in connections:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.ask(*next(todo))
        left = len(requests)
        while left:
            time.sleep(READ_SECONDS)
            for key, _ in selector.select(0):
                client = key.data
                if not client.read(streamed):
                    continue
                left -= 1
                found[client.number] = b"".join(client.parts)
                following = next(todo, None)
                if following is not None:
                    client.ask(*following)
        seconds = time.perf_counter() - start
    for client in connections:
        client.socket.close()
    return seconds, found


def text_of(answer: bytes, streamed: bool) -> str:
    """The text of an answer. ValueError if it is none."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError(f"a request was answered with {answer[:300]!r}")
    if streamed:
        chunks, rest = [], body
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not int(size, 16):
                break
            chunks.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(chunks)
    return texts_of(body, streamed)[0][0]


def requests_of(args: Arguments, prompts: list[str], streamed: bool) -> list[bytes]:
    """HTTP requests."""
    made = []
    for prompt in prompts:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True,
             "stream": streamed}
        ).encode()  # fmt: skip
        made.append(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
    return made


def measure(args: Arguments, address: tuple[str, int]) -> dict[str, list[float]]:
    """Tokens a second of each round, by who gave them."""
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(args.requests)]
    # The server has the same: prompts come again in each round, and would be found in the cache.
    llm = LLM(args.model, max_sequences=args.max_sequences, prefix_cache=False)
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    found: dict[str, list[float]] = {"LLM.generate": [], "streamed": [], "whole": []}
    tokens = args.requests * args.tokens
    llm.generate(prompts[: args.clients], params)
    ask_all(address, requests_of(args, prompts[: args.clients], True), args.clients, True)
    for _ in range(args.rounds):
        start = time.perf_counter()
        expected = [done.text for done in llm.generate(prompts, params)]
        found["LLM.generate"].append(tokens / (time.perf_counter() - start))
        for name in ("streamed", "whole"):
            streamed = name == "streamed"
            requests = requests_of(args, prompts, streamed)
            seconds, answers = ask_all(address, requests, args.clients, streamed)
            found[name].append(tokens / seconds)
            for prompt, answer, text in zip(prompts, answers, expected, strict=True):
                if (told := text_of(answer, streamed)) != text:
                    raise RuntimeError(f"{prompt!r} was answered with {told!r}, expected {text!r}")
    return found


def main(args: Arguments) -> None:
    """Print the figures."""
    options = ["--max-sequences", str(args.max_sequences), "--no-prefix-cache"]
    options += ["--stream-interval", str(args.stream_interval)]
    with running_server(args.model, *options) as server:
        asyncio.run(server.wait_ready())
        found = measure(args, ("127.0.0.1", server.port))
    median = {name: statistics.median(rates) for name, rates in found.items()}
    print(
        f"{args.requests} requests of {args.tokens} tokens, {args.clients} clients, "
        f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, "
        f"jax {jax.__version__}; tokens a second"
    )
    for name, rates in found.items():
        share = median[name] / median["LLM.generate"]
        print(f"{name}: {', '.join(f'{rate:,.0f}' for rate in rates)}; {share:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))

"""An engine that says what it is told to say, and what is needed to ask a server for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.server.app import make_app
from tbo_jax.server.interface import Generate, ModelInfo, Update
from tbo_jax.server.service import Service
from tbo_jax.server.settings import ServerSettings

MODEL = Path(__file__).parents[2] / "examples" / "kjv-moe"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class ScriptedClient:
    """Streams a text letter by letter, each a token, until `max_new_tokens`.

    Attributes:
        asked: what was asked for.
        open: the requests under way.
    """

    def __init__(self, folder: Path, text: str = "In the beginning", delay: float = 0.0) -> None:
        self.info = ModelInfo(str(folder), 1024, 2048, 20, True)
        self.is_ready = True
        self.text = text
        self.delay = delay
        self.asked: list[Generate] = []
        self.open: set[str] = set()
        self.refuse: Exception | None = None
        self.fails_after: int | None = None

    async def generate(self, request: Generate) -> AsyncIterator[Update]:
        self.asked.append(request)
        if self.refuse is not None:
            raise self.refuse
        self.open.add(request.request_id)
        try:
            params = request.params
            for number, letter in enumerate(self.text[: params.max_new_tokens]):
                for sample in range(params.n):
                    logprobs = None
                    if params.logprobs is not None:
                        top = {token: -1.0 - token for token in range(params.logprobs)}
                        logprobs = [TokenLogprobs(ord(letter), -0.5, 1, top)]
                    yield Update(sample, [ord(letter)], letter, logprobs)
                await asyncio.sleep(self.delay)
                if self.fails_after == number:
                    raise RuntimeError("the engine is gone")
            reason = "length" if len(self.text) >= params.max_new_tokens else "stop"
            known: list[TokenLogprobs | None] | None = None
            if params.prompt_logprobs is not None:
                others = request.prompt_token_ids[1:]
                known = [None, *(TokenLogprobs(i, -2.0, 3, {i: -2.0}) for i in others)]
            for sample in range(params.n):
                yield Update(
                    sample,
                    finish_reason=reason,
                    num_cached_tokens=1,
                    prompt_logprobs=None if sample else known,
                )
        finally:
            self.open.discard(request.request_id)

    async def statistics(self) -> dict[str, Any]:
        return {"running": len(self.open), "waiting": 0, "pages": 8, "free_pages": 6, "steps": 3,
                "steps_split": 1, "generated_tokens": 5, "prompt_tokens": 7, "cached_tokens": 2,
                "preemptions": 0, "steps_in_chunks": 1, "step_seconds": 0.5,
                "wait_seconds": 0.25}  # fmt: skip

    async def close(self, *, seconds: float = 0.0) -> None:
        self.is_ready = False


def make_service(client: Any, *, keys: tuple[str, ...] = (), **settings: Any) -> Service:
    return Service(client, "model", ServerSettings(**settings), keys)


@contextlib.asynccontextmanager
async def asking(service: Service, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", **options) as client:
        yield client


def ask(service: Service, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """One request: a POST with a body, or else a GET."""

    async def main() -> httpx.Response:
        async with asking(service) as client:
            if body is None:
                return await client.get(path, **options)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, **options)

    return asyncio.run(asyncio.wait_for(main(), 60))


def events_of(text: str) -> list[Any]:
    """The JSON of the events of a stream, and "[DONE]"."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def raw(
    service: Service, path: str, body: Any, on_send: Callable[[dict[str, Any]], Any]
) -> None:
    """A POST whose client leaves when `on_send` says so, by True; it is awaited if it is a task."""
    left = asyncio.Event()
    sent_body = False

    async def receive() -> dict[str, Any]:
        nonlocal sent_body
        if not sent_body:
            sent_body = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        answer = on_send(message)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            left.set()
            await asyncio.sleep(0)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [],
        "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("t", 80),
        "client": ("c", 1), "root_path": "", "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    await make_app(service)(scope, receive, send)

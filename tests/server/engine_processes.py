"""An engine in a process of its own for the tests of a module, and what is asked of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tbo_jax import SamplingParams
from tbo_jax.engine.config import EngineConfig
from tbo_jax.server.interface import Generate, Update
from tbo_jax.server.remote import RemoteClient
from tbo_jax.server.supervisor import Supervisor

T = TypeVar("T")

SMALL = EngineConfig(
    devices=1, max_sequences=4, max_batched_tokens=16, page_size=4, num_pages=96, max_context=120,
    prompt_logprobs=True,
)  # fmt: skip


class Served:
    """A supervisor and a client of its engine, in one event loop that runs within `run`."""

    def __init__(
        self, runner: asyncio.Runner, supervisor: Supervisor, client: RemoteClient
    ) -> None:
        self.runner = runner
        self.supervisor = supervisor
        self.client = client

    def run(self, main: Coroutine[Any, Any, T], seconds: float = 60) -> T:
        return self.runner.run(asyncio.wait_for(main, seconds))

    def kill(self) -> None:
        assert self.supervisor.pid is not None
        os.kill(self.supervisor.pid, signal.SIGKILL)


@contextmanager
def served(
    model: Path, config: EngineConfig = SMALL, cache: Path | None = None, **options: Any
) -> Iterator[Served]:
    """Programs are kept in `cache`."""
    if cache is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    try:
        with asyncio.Runner() as runner:

            async def start() -> tuple[Supervisor, RemoteClient]:
                supervisor = Supervisor(model, config, **options)
                await supervisor.start()
                client = RemoteClient(supervisor.path)
                await client.wait_ready()
                return supervisor, client

            supervisor, client = runner.run(start())
            try:
                yield Served(runner, supervisor, client)
            finally:
                runner.run(client.close())
                runner.run(supervisor.stop())
    finally:
        if cache is not None:
            del os.environ["JAX_COMPILATION_CACHE_DIR"]
            del os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]


def asked(prompt: list[int], name: str = "r", **options: Any) -> Generate:
    request = {
        key: options.pop(key)
        for key in ("tells_tokens", "cache_salt", "priority")
        if key in options
    }
    params = SamplingParams(**dict(max_new_tokens=12, ignore_eos=True) | options)
    return Generate(name, prompt, params, **request)


def joined(updates: list[Update]) -> list[Update]:
    """One update for each sample, of all that was told of it."""
    found: dict[int, Update] = {}
    for update in updates:
        known = found.setdefault(update.sample, Update(update.sample, []))
        assert known.finish_reason is None, "told after the end"
        known.token_ids = known.token_ids + update.token_ids
        known.text += update.text
        if update.logprobs is not None:
            known.logprobs = (known.logprobs or []) + update.logprobs
        for name in ("finish_reason", "error", "num_cached_tokens", "prompt_logprobs"):
            setattr(known, name, getattr(update, name))
    return [found[sample] for sample in sorted(found)]


async def collect(client: RemoteClient, request: Generate) -> list[Update]:
    return joined([update async for update in client.generate(request)])


class Near(float):
    """A number that equals others up to the rounding of steps of another shape."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-3

    __hash__ = None  # type: ignore[assignment]


def comparable(update: Update) -> Any:
    """What does not depend on the batch, nor on what was in the cache."""

    def rounded(known: Any) -> Any:
        if known is None:
            return None
        return [one and (one.token_id, Near(one.logprob), one.rank) for one in known]

    return msgspec.structs.astuple(
        msgspec.structs.replace(
            update, num_cached_tokens=0, logprobs=rounded(update.logprobs),
            prompt_logprobs=rounded(update.prompt_logprobs),
        )
    )  # fmt: skip


def random_asked(rng: random.Random, number: int, vocabulary: int = 160) -> Generate:
    """A request with options of any kind."""
    prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 40))]
    choices: list[dict[str, Any]] = [
        {}, dict(temperature=1.0, top_p=0.9), dict(temperature=0.8, top_k=20, min_p=0.05),
        dict(repetition_penalty=1.3, frequency_penalty=0.5, temperature=1.0),
        dict(stop=("w7", "9 w1"), temperature=1.2), dict(logprobs=2), dict(n=3, temperature=1.0),
        dict(min_tokens=5, stop_token_ids=list(range(0, vocabulary, 7)), temperature=1.0),
        dict(regex="w1( w[0-9]+){2,9}", ignore_eos=False, temperature=1.0),
        dict(tells_tokens=False, temperature=1.0), dict(prompt_logprobs=1),
        dict(bad_words=("w7 w8",), logit_bias={3: 2.0}, presence_penalty=1.0),
        dict(cache_salt="mine", priority=rng.randint(-1, 1)),
    ]  # fmt: skip
    options = rng.choice(choices)
    return asked(
        prompt, f"r{number}", seed=rng.randrange(1000), max_new_tokens=rng.randint(5, 60), **options
    )


async def until(condition: Any, seconds: float = 120) -> None:
    """Wait until it holds; a test in which it never does fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        await asyncio.sleep(0.01)

"""The prompts of one request, run together: what comes of each, in the order in which it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from tbo_jax.sampling.params import SamplingParams
from tbo_jax.server.errors import ApiError
from tbo_jax.server.interface import Generate, Update
from tbo_jax.server.metrics import Watch
from tbo_jax.server.options import of_params
from tbo_jax.server.service import Service


@dataclass(frozen=True)
class Run:
    """Prompts to run, each `params.n` times.

    Attributes:
        request_id: of the request; each prompt has one that begins with it.
        prompts: token ids.
        params: of each prompt.
        salt: of who asks.
        tells_tokens: whether there is a stream.
    """

    request_id: str
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    salt: str
    priority: int
    tells_tokens: bool

    @property
    def num_choices(self) -> int:
        """How many completions there are."""
        return sum(params.n for params in self.params)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def most_tokens(self) -> int:
        """How many tokens may be needed at most."""
        pairs = zip(self.prompts, self.params, strict=True)
        return sum(params.n * (len(prompt) + params.max_new_tokens) for prompt, params in pairs)


class Counts:
    """What a run took so far, in tokens."""

    def __init__(self) -> None:
        self.generated = 0
        self.cached = 0


@asynccontextmanager
async def started(
    service: Service, run: Run, counts: Counts
) -> AsyncIterator[AsyncIterator[tuple[int, Update]]]:
    """Run prompts: inside, (number of the completion, update) as they come.

    Leaving ends what is unfinished. When it is entered the engine has taken the prompts, so that
    what it refuses is known before an answer begins.

    Raises:
        ApiError: too many completions or tokens, the engine refuses something, or fails.
    """
    service.check_open()
    most = service.limits.max_samples
    if run.num_choices > most:
        raise ApiError(
            400, f"n asks for {run.num_choices} completions: expected at most {most}", param="n"
        )
    watch = Watch(service.metrics)
    with service.queue.hold(run.most_tokens):
        async with aclosing(_updates(service, run)) as updates:
            try:
                first = await anext(updates)
            except StopAsyncIteration:
                raise ApiError(500, "the engine gave nothing") from None
            _check(first[1])
            async with aclosing(_watched(service, run, first, updates, counts, watch)) as told:
                yield told
    watch.over(run.prompt_tokens, counts.generated)


async def _watched(
    service: Service,
    run: Run,
    first: tuple[int, Update],
    updates: AsyncIterator[tuple[int, Update]],
    counts: Counts,
    watch: Watch,
) -> AsyncGenerator[tuple[int, Update], None]:
    number, update = first
    while True:
        if update.token_ids:
            counts.generated += len(update.token_ids)
            if run.tells_tokens:
                watch.tokens(number, len(update.token_ids))
        if update.finish_reason is not None:
            if update.sample == 0:
                counts.cached += update.num_cached_tokens
            service.metrics.finished(update.finish_reason)
            _check(update)
        yield number, update
        try:
            number, update = await anext(updates)
        except StopAsyncIteration:
            return


def _check(update: Update) -> None:
    """ApiError for a completion that has no end of its own."""
    if update.finish_reason == "error":
        error = update.error or ""
        if error.startswith("SamplingParams."):  # a grammar that turns out to be too much
            raise of_params(ValueError(error))
        raise ApiError(500, f"the engine failed on the request: {error:.300}")
    if update.finish_reason == "abort":
        raise ApiError(503, "the request was aborted", headers={"Retry-After": "5"})


async def _updates(service: Service, run: Run) -> AsyncGenerator[tuple[int, Update], None]:
    """Those of all prompts. One that is slow to be read is slow to be asked for, so that no more
    than one of each prompt waits here."""
    async with AsyncExitStack() as stack:
        waiting: dict[asyncio.Task[Update], tuple[int, Any]] = {}

        async def cancel() -> None:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        iterators = []
        first = 0
        for number, (prompt, params) in enumerate(zip(run.prompts, run.params, strict=True)):
            request = Generate(
                f"{run.request_id}-{number}",
                prompt,
                params,
                run.salt,
                run.priority,
                run.tells_tokens,
            )
            iterator = cast(Any, service.client.generate(request))
            await stack.enter_async_context(aclosing(iterator))
            iterators.append((first, iterator))
            first += params.n
        try:
            if len(iterators) == 1:
                async for update in iterators[0][1]:
                    yield update.sample, update
                return
            stack.push_async_callback(cancel)  # before the iterators are closed
            for pair in iterators:
                waiting[asyncio.ensure_future(anext(pair[1]))] = pair
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    pair = waiting.pop(task)
                    try:
                        update = task.result()
                    except StopAsyncIteration:
                        continue
                    yield pair[0] + update.sample, update
                    waiting[asyncio.ensure_future(anext(pair[1]))] = pair
        except ValueError as error:
            raise of_params(error) from None
        except RuntimeError as error:
            raise ApiError(503, f"the engine gave the request up: {error!s:.300}") from None

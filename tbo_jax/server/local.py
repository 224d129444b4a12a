"""An engine in this process, for the tasks of this process's event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from tbo_jax.engine.async_llm import AsyncLLM, TokenStream
from tbo_jax.engine.generation import Completion
from tbo_jax.engine.llm import LLM
from tbo_jax.engine.running import TokenEvent
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.server.interface import Generate, ModelInfo, Update
from tbo_jax.server.updates import Pending


class LocalClient:
    """An `EngineClient` over `AsyncLLM`. Making it starts the engine's thread."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._front = AsyncLLM(llm)
        self._open = True
        self._info = ModelInfo.of(llm)

    @property
    def info(self) -> ModelInfo:
        """Of the model it runs."""
        return self._info

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, and the last step went well."""
        return self._open and self._front.step_error is None

    async def generate(self, request: Generate) -> AsyncIterator[Update]:
        """Run a prompt; as `EngineClient.generate`.

        A reader that is slow gets fewer updates, each of several tokens.
        """
        stream = await self._front.stream(
            request.prompt_token_ids,
            request.params,
            request_id=request.request_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        if not request.tells_tokens:
            async for update in _at_the_end(stream):
                yield update
            return
        pending = Pending()
        pump = asyncio.create_task(self._pump(stream, pending, request.params))
        try:
            async for update in pending:
                yield update
        finally:
            pump.cancel()
            stream.abort()

    async def _pump(self, stream: TokenStream, pending: Pending, params: SamplingParams) -> None:
        try:
            async for event in stream:
                pending.put(self._update(event, params))
            completion = stream.completion
            assert completion is not None
            for sample, done in enumerate((completion, *completion.others)):
                pending.put(_last(sample, done))
            pending.end()
        except Exception as error:
            pending.end(error)

    def _update(self, event: TokenEvent, params: SamplingParams) -> Update:
        """Of one token, unless it is one that ended the text, as a completion has it.

        How the sample ended comes with the completion, which knows the rest of it.
        """
        token = event.token_id
        if event.finish_reason is not None and token is not None:
            token = None if self._llm.engine.leaves_out(params, token) else token
        if token is None:
            return Update(event.sample, text=event.text)
        logprobs = None if event.logprobs is None else [event.logprobs]
        return Update(event.sample, [token], event.text, logprobs)

    async def statistics(self) -> dict[str, Any]:
        """Counts and times, and what runs now."""
        return self._llm.snapshot() | self._llm.engine.scheduler.load

    async def close(self, *, seconds: float = 0.0) -> None:
        """Take no more requests; end those under way after so many seconds at the latest."""
        self._open = False
        if seconds > 0:
            late = threading.Timer(seconds, self._front.shutdown)
            late.daemon = True
            late.start()
            await self._front.ashutdown(drain=True)
            late.cancel()
        else:
            await self._front.ashutdown()


async def _at_the_end(stream: TokenStream) -> AsyncIterator[Update]:
    try:
        async for _ in stream:
            pass
    finally:
        stream.abort()
    assert stream.completion is not None
    first = stream.completion
    for sample, done in enumerate((first, *first.others)):
        last = _last(sample, done)
        last.token_ids, last.text, last.logprobs = done.token_ids, done.text, done.logprobs
        yield last


def _last(sample: int, done: Completion) -> Update:
    return Update(
        sample,
        finish_reason=done.finish_reason,
        error=done.error,
        num_cached_tokens=done.num_cached_tokens,
        prompt_logprobs=done.prompt_logprobs if sample == 0 else None,
    )

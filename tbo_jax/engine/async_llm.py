"""`AsyncLLM`: an `LLM` for the tasks of event loops, such as those of a server."""

from __future__ import annotations

import asyncio
import os
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import jax

from tbo_jax.engine.background import EngineThread, Ticket
from tbo_jax.engine.channel import Channel
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.generation import Asked, Completion, Prompt
from tbo_jax.engine.llm import LLM
from tbo_jax.engine.running import TokenEvent
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import check_template_arguments

ENCODING_THREADS = 4  # which make token ids of prompts


class AsyncLLM:
    """A language model for the tasks of event loops, whose prompts are all batched together.

    A thread of its own runs the engine while there is work. Methods may be called from any thread
    and any event loop; none of them makes an event loop wait, but `shutdown` does. Beside it,
    `generate` of the same `LLM` may be called from other threads.

    A step that fails is tried anew. After three in a row all requests under way end with a
    RuntimeError, whose cause is what the last step raised; later requests are taken, and fare as
    they may. `step_error` tells a health check of it.

    As a context manager, `with` or `async with`, it is shut down at the end: it finishes what runs,
    or aborts that if the block raised. It needs not be shut down before the interpreter exits.
    """

    def __init__(
        self,
        model: LLM | str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        show_progress: bool = False,
        **options: Any,
    ):
        """Load and compile, where `model` is not an `LLM`, and start the thread.

        Args:
            model: an `LLM`, or what `LLM` takes as its model: a folder, or an id on the hub.
            config, show_progress, options: as `LLM` takes them; not beside an `LLM`.

        Raises:
            TypeError: options beside an `LLM`; and as `LLM`.
            ValueError: as `LLM`.
            RuntimeError: there are several processes.
        """
        if isinstance(model, LLM):
            given = options | ({} if config is None else {"config": config})
            if given or show_progress:
                raise TypeError(f"expected an LLM or options, got both: {given or 'show_progress'}")
            self.llm = model
        else:
            self.llm = LLM(model, config, show_progress=show_progress, **options)
        if jax.process_count() > 1:
            raise RuntimeError(
                f"there are {jax.process_count()} processes: expected one, as requests come to "
                "this one only, at any time, and all would have to run them in the same order"
            )
        self._thread = EngineThread(self.llm.engine, self.llm.calls)
        self._encoders = ThreadPoolExecutor(ENCODING_THREADS, "tbo_jax prompts")
        # Without a shutdown the thread ends when nobody has this object, or a stream of it.
        weakref.finalize(self, self._thread.leave).atexit = False  # the thread sees to that itself

    @property
    def num_unfinished(self) -> int:
        """The requests under way."""
        return self._thread.num_unfinished

    @property
    def step_error(self) -> Exception | None:
        """What the last step raised; None if it went well."""
        return self._thread.step_error

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> TokenStream:
        """Generate, and tell each token as it comes.

        This returns when the engine has the prompt; it is read in another thread. When the task is
        cancelled before, the request is aborted.

        Args:
            prompt: a text, a list of token ids, or a chat (a list of {"role", "content"}).
            params: what is asked for; default `llm.default_sampling.params()`.
            request_id: a name for `abort`; default one that nobody else has.
            chat_template_kwargs, cache_salt: as `LLM.generate` takes them.
            priority: the lower, the earlier its turn, as vLLM's.

        Raises:
            ValueError: the prompt cannot run (it is empty, too long, ...), the engine cannot do
                what `params` ask for, an argument is of another kind, or an unfinished request has
                this id.
            RuntimeError: it was shut down, or its thread has ended with an error.
        """
        return await self._submit(
            prompt,
            params,
            request_id,
            chat_template_kwargs,
            cache_salt,
            priority,
            tells_tokens=True,
        )

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Completion:
        """Generate, and give all of it at the end. If the task is cancelled, so is the request.

        This takes less of the host than a stream: nothing is told of single tokens.

        Args:
            prompt, params, request_id, chat_template_kwargs, cache_salt, priority: as `stream`
                takes them.

        Raises:
            ValueError: as `stream`.
            RuntimeError: as `stream`; or three steps failed in a row, or somebody took the request
                out of the engine.
        """
        stream = await self._submit(
            prompt,
            params,
            request_id,
            chat_template_kwargs,
            cache_salt,
            priority,
            tells_tokens=False,
        )
        try:
            async for _ in stream:
                pass
        finally:
            stream.abort()
        assert stream.completion is not None
        return stream.completion

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        cache_salt: str,
        priority: int,
        *,
        tells_tokens: bool,
    ) -> TokenStream:
        if request_id is None:
            request_id = uuid.uuid4().hex
        _check_request_id(request_id)
        kwargs = check_template_arguments(chat_template_kwargs)
        if params is None:
            params = self.llm.default_sampling.params()
        encode = partial(self.llm.encode, chat_template_kwargs=kwargs)

        def read() -> Asked:
            asked = Asked.read(prompt, params, cache_salt, encode, priority)
            # Here, since the engine's own thread has steps to run.
            self.llm.engine.prepare(asked.params)
            return asked

        asked = await self._in_thread(read)
        stream = TokenStream(self, Ticket(request_id, asked, Channel(), tells_tokens))
        try:
            await stream._added()
        except BaseException:  # cancelled, perhaps
            stream.abort()
            raise
        return stream

    async def _in_thread(self, read: Callable[[], Asked]) -> Asked:
        self._thread.check_open()
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._encoders, read)
        except RuntimeError:  # it was shut down at this moment
            self._thread.check_open()
            raise
        return await reading

    def abort(self, request_id: str) -> bool:
        """End a request: it gives what there is, with finish reason "abort".

        Args:
            request_id: as `TokenStream.request_id` tells it.

        Returns:
            Whether there is such an unfinished request; otherwise nothing happens.

        Raises:
            ValueError: it is no text.
            RuntimeError: there is no such request, and `stream` would raise it too.
        """
        return self._thread.abort_by_id(_check_request_id(request_id))

    def shutdown(self, *, drain: bool = False) -> None:
        """End the thread, and wait for that. From then on calls raise RuntimeError.

        The `LLM` can still be used. A second shutdown is nothing new, but that one without `drain`
        aborts what another waits for.

        Args:
            drain: finish the requests under way; otherwise they end with finish reason "abort".
        """
        self._stop(drain)
        self._thread.join()

    async def ashutdown(self, *, drain: bool = False) -> None:
        """Do as `shutdown`, and let the event loop run meanwhile."""
        self._stop(drain)
        await asyncio.to_thread(self._thread.join)

    def _stop(self, drain: bool) -> None:
        self._thread.stop(drain)
        self._encoders.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.shutdown(drain=kind is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        await self.ashutdown(drain=kind is None)


class TokenStream:
    """The tokens of a prompt as they come, and its completion at the end.

    It is an asynchronous iterator of `TokenEvent`, for the event loop in which it was made. With
    `n` above 1 the events are those of all samples. Iterating raises the RuntimeErrors of
    `AsyncLLM.complete`.

    A loop over it that is left early, by `break`, an exception or a cancelled task, aborts the
    request; so does it if nobody has the stream any more. Whoever takes events one by one may wait
    for `anext(stream)` with a time limit: that neither aborts nor loses anything. A slow reader
    holds up nobody: what it has not taken yet is kept.

    Attributes:
        request_id: its name for `AsyncLLM.abort`; the events have the engine's own ids.
        completion: what the prompt gave; None until the last event was taken.
    """

    def __init__(self, llm: AsyncLLM, ticket: Ticket) -> None:
        """`AsyncLLM.stream` makes it."""
        self.request_id = ticket.request_id
        self.completion: Completion | None = None
        self._llm = llm  # which is not shut down as long as this is here
        self._ticket = ticket
        self._is_over = True  # until it has begun

    async def _added(self) -> None:
        self._llm._thread.submit(self._ticket)
        self._is_over = False
        channel = self._ticket.channel
        while not channel.items:
            await channel.arrival()
        item = channel.items.popleft()
        if isinstance(item, Exception):
            self._is_over = True
            raise item

    def __aiter__(self) -> _Iteration:
        return _Iteration(self)

    async def __anext__(self) -> TokenEvent:
        if self._is_over:
            raise StopAsyncIteration
        channel = self._ticket.channel
        while not channel.items:
            await channel.arrival()
        item = channel.items.popleft()
        if isinstance(item, TokenEvent):
            return item
        self._is_over = True
        if isinstance(item, Exception):
            raise item
        self.completion = item
        raise StopAsyncIteration

    def abort(self) -> None:
        """End the request: the stream gives what there is, with finish reason "abort"."""
        if not self._is_over:
            self._llm._thread.abort(self._ticket)

    def __del__(self) -> None:
        self.abort()


class _Iteration:
    """A loop over a stream: when it is left early, the request is aborted."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Any:
        return self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.abort()


def _check_request_id(request_id: object) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"request_id is {request_id!r:.80}: expected a text that is not empty")
    return request_id

"""The updates of a request of a `RemoteClient`, on their way to who reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tbo_jax.server.interface import Update


class Stream:
    """What came of a request and nobody took yet, joined, so that slow readers cost nothing."""

    __slots__ = ("_error", "_pending", "_tells_tokens", "_waiter", "unfinished")

    def __init__(self, tells_tokens: bool) -> None:
        """Args:
        tells_tokens: tell tokens before a sample is over.
        """
        self.unfinished: set[int] = set()  # numbers of its samples
        self._tells_tokens = tells_tokens
        self._pending: dict[int, Update] = {}  # by sample
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put_token(self, sample: int, token: int, text: str) -> None:
        """One more token of a sample."""
        update = self._pending.get(sample)
        if update is None:
            self._pending[sample] = Update(sample, [token], text)
        else:
            update.token_ids.append(token)
            update.text += text
        if self._tells_tokens:
            self.wake()

    def put(self, later: Update) -> None:
        """More of a sample."""
        update = self._pending.get(later.sample)
        if update is None:
            self._pending[later.sample] = later
        else:
            update.join(later)
        if self._tells_tokens or later.finish_reason is not None:
            self.wake()

    def fail(self, error: Exception) -> None:
        """Have the iteration raise it, after what there is."""
        self._error = error
        self.wake()

    def clear(self) -> None:
        """Drop what nobody took."""
        self._pending.clear()
        self.wake()

    def wake(self) -> None:
        """Have the reader take what there is."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _next(self) -> Update | None:
        for sample, update in self._pending.items():
            if self._tells_tokens or update.finish_reason is not None or self._error is not None:
                del self._pending[sample]
                return update
        return None

    async def next(self) -> Update:
        """Wait for an update."""
        while (update := self._next()) is None:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self.unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return update


class Updates:
    """The iteration over a stream: when it is left or nobody has it any more, the request ends."""

    __slots__ = ("_leave", "_stream")

    def __init__(self, stream: Stream, leave: Callable[[Stream], None]) -> None:
        self._stream = stream
        self._leave = leave

    def __aiter__(self) -> Updates:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Update]:
        return self._stream.next()

    async def aclose(self) -> None:
        """Leave it: the request ends within a step, and the iteration at once."""
        self._leave(self._stream)
        self._stream.clear()

    def __del__(self) -> None:
        if self._stream.unfinished:
            self._leave(self._stream)

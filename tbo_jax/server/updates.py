"""Updates that wait for their reader: those of a sample are joined, so that they stay few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tbo_jax.server.interface import Update


class Pending:
    """Updates on their way to one reader: at most one of each sample waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Update]] = {}
        self._arrived = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    def put(self, update: Update) -> None:
        """Hand an update over. They are joined when they are read: each is then looked at once."""
        self._waiting.setdefault(update.sample, []).append(update)
        self._arrived.set()

    def end(self, error: Exception | None = None) -> None:
        """Say that no more comes, and why, if that is an error."""
        self._ended, self._error = True, error
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            await self._arrived.wait()
            waiting, self._waiting = self._waiting, {}
            self._arrived.clear()
            ended = self._ended
            for updates in waiting.values():
                yield _joined(updates)
            if ended and not self._waiting:
                if self._error is not None:
                    raise self._error
                return
            if ended:
                self._arrived.set()


def _joined(updates: list[Update]) -> Update:
    if len(updates) == 1:
        return updates[0]
    last = updates[-1]
    logprobs = [known for update in updates for known in update.logprobs or ()]
    has_logprobs = any(update.logprobs is not None for update in updates)
    return Update(
        last.sample,
        [token for update in updates for token in update.token_ids],
        "".join(update.text for update in updates),
        logprobs if has_logprobs else None,
        last.finish_reason,
        last.error,
        last.num_cached_tokens,
        last.prompt_logprobs,
    )

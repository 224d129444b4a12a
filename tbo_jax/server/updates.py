"""Updates that wait for their reader: those of a sample are joined, so that they stay few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tbo_jax.server.interface import Update


class Pending:
    """Updates on their way to one reader: at most one of each sample waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, Update] = {}  # by sample
        self._arrived = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    def put(self, update: Update) -> None:
        """Hand an update over, which may be used no more."""
        waiting = self._waiting.setdefault(update.sample, update)
        if waiting is not update:
            waiting.join(update)
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
            for update in waiting.values():
                yield update
            if ended and not self._waiting:
                if self._error is not None:
                    raise self._error
                return
            if ended:
                self._arrived.set()

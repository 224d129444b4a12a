"""What hands items from a thread to tasks of event loops, many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """Items for one task of the event loop that runs where it is made; in order, without a bound.

    The task takes them from `items`, and awaits `arrival()` while there is none. If it is cancelled
    there nothing is lost.
    """

    __slots__ = ("_waiter", "items", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def arrival(self) -> asyncio.Future[None]:
        """What is done when there is another item. (No coroutine: that would cost a quarter more.)

        Raises:
            RuntimeError: it is called in another event loop, or another task waits already.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("a stream was read in another event loop than the one that made it")
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("a stream was read by two tasks at a time: expected one")
        self._waiter = self.loop.create_future()
        return self._waiter

    def _put(self, item: T) -> None:
        self.items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def send(loop: asyncio.AbstractEventLoop, batch: Iterable[tuple[Channel[T], T]]) -> None:
    """Hand each item to its channel, one of `loop`; from any thread.

    The loop is woken once for all of them.

    Raises:
        RuntimeError: the loop is closed.
    """
    loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: Iterable[tuple[Channel[T], T]]) -> None:
    for channel, item in batch:
        channel._put(item)

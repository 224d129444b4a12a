"""What lets several threads share an engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import jax


class FairLock:
    """A lock that threads get in the order in which they asked; the holder may take it again.

    With `threading.RLock` a thread that takes it in a loop, as one that decodes does, shuts out the
    others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()  # idents of threads: the holder, then those who wait
        self._depth = 0  # how often the holder has it

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if not self._depth or self._queue[0] != me:
                self._queue.append(me)
                try:
                    self._changed.wait_for(lambda: self._queue[0] == me)
                except BaseException:  # interrupted
                    self._queue.remove(me)
                    self._changed.notify_all()
                    raise
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._queue.popleft()
                self._changed.notify_all()


class Calls:
    """The calls of `LLM.generate` under way: of which threads, and for how long there were any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[int] = []
        self._seconds = 0.0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """How long there was a call or more."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._threads else 0.0)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be a call. Raises RuntimeError like `check_thread`."""
        me = threading.get_ident()
        with self._lock:
            self._refuse_others("generate")
            if not self._threads:
                self._since = time.perf_counter()
            self._threads.append(me)
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(me)
                if not self._threads:
                    self._seconds += time.perf_counter() - self._since

    def check_thread(self, name: str) -> None:
        """Refuse what the other processes would do at another step, or in another order.

        Raises:
            RuntimeError: there are several processes, and another thread is in a call.
        """
        with self._lock:
            self._refuse_others(name)

    def _refuse_others(self, name: str) -> None:
        others = set(self._threads) - {threading.get_ident()}
        if others and jax.process_count() > 1:
            raise RuntimeError(
                f"{name} was called while another thread generates: of several processes each has "
                "to do the same in the same order, so call it from one thread"
            )

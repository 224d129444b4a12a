"""uvicorn's connections, with bounds on the head of a request: its bytes and its time.

uvicorn bounds neither the time that a head takes nor, with httptools, its length. A client could
hold connections and memory with heads that never end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS, import_from_string

_END = b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _END
_TOO_LATE = b"HTTP/1.1 408 Request Timeout" + _END


def connection_class(most_bytes: int, seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's class for connections (httptools where it is installed, else h11), bounded."""
    base: Any = import_from_string(HTTP_PROTOCOLS["auto"])
    if isinstance(base, str):
        base = import_from_string(base)
    base = getattr(base, "AutoHTTPProtocol", base)

    class Bounded(base):
        """A connection whose heads are bounded."""

        _head = 0  # bytes of the one that is on its way
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect(self.config.timeout_keep_alive)

        def data_received(self, data: bytes) -> None:
            idle = self._is_idle()
            if idle:
                if not self._head:
                    self._expect(seconds)
                self._head += len(data)
                # What follows a head in the same piece is its body: one piece more than the bound.
                if self._head > most_bytes and b"\r\n\r\n" not in data:
                    self._refuse(_TOO_LARGE)
                    return
            super().data_received(data)
            if idle and not self._is_idle():
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _is_idle(self) -> bool:
            cycle = self.cycle
            return cycle is None or cycle.response_complete

        def _expect(self, within: float) -> None:
            self._stop()
            self._timer = self.loop.call_later(within, self._late)

        def _stop(self) -> None:
            self._head = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._timer = None
            if self._is_idle():
                self._refuse(_TOO_LATE)

        def _refuse(self, answer: bytes) -> None:
            self._stop()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return Bounded

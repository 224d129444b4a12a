"""Server-sent events, and requests whose client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tbo_jax.server.errors import ApiError
from tbo_jax.server.service import encode

logger = logging.getLogger(__name__)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: object, name: str | None = None) -> bytes:
    """One event, of JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(value) + b"\n\n"


class TextEvents:
    """Events that are alike but for one text: the rest of their JSON is encoded once."""

    PLACE = "\0text\0"  # where the text goes

    def __init__(self, value: object) -> None:
        """Args:
        value: of such an event, with `PLACE` as its text.
        """
        self._before, self._after = event(value).split(encode(self.PLACE))

    def of(self, text: str) -> bytes:
        """The event with a text."""
        return self._before + encode(text) + self._after


class EventStream(Response):
    """An answer of events that come one by one.

    The next one is asked for when the last one is on its way, so that a slow client has few of them
    waiting. When the client leaves, the events are closed.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        on_error: Callable[[ApiError], bytes] = lambda error: event(error.body()) + DONE,
    ) -> None:
        """Send events.

        Args:
            events: an asynchronous generator. What it raises becomes the last event.
            close: is called at the end, also if no event was asked for.
            on_error: makes that of an error.
        """
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application."""
        try:
            # The layers around need to know that the answer begins. What follows they only pass on,
            # each token of it.
            await unless_left(receive, self._send_all(send, scope.get("tbo_jax.send", send)))
        except ClientDisconnect:
            logger.info("the client left its stream")
        finally:
            await self._close()

    async def _send_all(self, begin: Send, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            await begin({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except ApiError as error:
                logger.warning("a stream ended with an error: %s", error.message)
                body = self._on_error(error)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            except Exception:
                logger.exception("a stream failed")
                body = self._on_error(ApiError(500, "the server failed on this request"))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled when the client leaves.

    Args:
        receive: gives nothing any more but the news of that: the body was read.

    Raises:
        ClientDisconnect: the client left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """The answer that `work` gives, unless the client leaves before."""

    async def run() -> Response:
        return await work()

    return await unless_left(request.receive, run())

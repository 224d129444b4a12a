"""What happens around every request: its id, who asks, its line in the log, errors as answers."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tbo_jax.server.errors import ApiError
from tbo_jax.server.page import GETS, POSTS
from tbo_jax.server.service import Service

logger = logging.getLogger(__name__)

# Without a key: probes, Prometheus, and pages, which hold nothing that is a client's.
_OPEN = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs")
_KNOWN = frozenset({*POSTS, *GETS, *_OPEN})
_SANE_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
_LEFT = 499  # as nginx logs a client that left


class AroundRequests:
    """The middleware of all routes.

    A request keeps the id that its client gave as `x-request-id`, if it is a sane one. The log has
    no text of prompts or completions: neither do the errors that it names.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        # Of an engine's requests no two may have the same one, and a client can say one twice.
        scope["tbo_jax.request_id"] = f"{request_id}-{uuid.uuid4().hex[:8]}"
        scope["tbo_jax.send"] = send  # for what no layer looks at: see `EventStream`
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id, headers)
        except ClientDisconnect:
            status = status or _LEFT
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("%s: the server failed on this request", request_id)
                error = ApiError(500, "the server failed on this request")
            if not status:
                await error.response()(scope, receive, send_with_id)
        path = scope["path"] if scope["path"] in _KNOWN else "other"
        self._service.metrics.answered(path, status)
        level = logging.DEBUG if path in _OPEN else logging.INFO
        seconds = time.perf_counter() - start
        logger.log(level, "%s %s %s %d %.3f s", request_id, scope["method"], path, status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        scope["tbo_jax.salt"] = ""
        if scope["path"] not in _OPEN:
            scope["tbo_jax.salt"] = self._service.keys.check(headers)
        await self._app(scope, receive, send)

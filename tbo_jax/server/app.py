"""The API as an ASGI application: routes, who may use them, and answers to what goes wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tbo_jax.server import plain, status
from tbo_jax.server.around import AroundRequests
from tbo_jax.server.bodies import body_of
from tbo_jax.server.chat import ChatJob
from tbo_jax.server.completions import CompletionJob
from tbo_jax.server.errors import ApiError, json_response
from tbo_jax.server.page import POSTS, chat_page, docs_page, openapi
from tbo_jax.server.responses import ResponseJob
from tbo_jax.server.service import Service
from tbo_jax.server.settings import words
from tbo_jax.server.streams import answered

T = TypeVar("T", bound=msgspec.Struct)
Job = Callable[[Service, Any, str], Any]

_CONTENT = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(service: Service) -> Starlette:
    """The application that serves a model."""

    def generating(path: str, job: Job) -> Route:
        async def endpoint(request: Request) -> Response:
            body = await _body(request, POSTS[path][0])
            made = job(service, body, request.scope["tbo_jax.salt"])
            request_id = request.scope["tbo_jax.request_id"]
            return await answered(request, lambda: made.answer(request_id))

        return Route(path, endpoint, methods=["POST"])

    def plain_post(path: str, work: Callable[[Service, Any], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            body = await _body(request, POSTS[path][0])
            return await answered(request, lambda: work(service, body))

        return Route(path, endpoint, methods=["POST"])

    def get(path: str, work: Callable[[Service, Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await work(service, request)

        return Route(path, endpoint, methods=["GET"])

    async def _body(request: Request, kind: type[T]) -> T:
        limits = service.limits
        return await body_of(request, kind, limits.max_body_bytes, limits.body_seconds)

    routes = [
        generating("/v1/chat/completions", ChatJob),
        generating("/v1/completions", CompletionJob),
        generating("/v1/responses", ResponseJob),
        plain_post("/tokenize", plain.tokenize),
        plain_post("/detokenize", plain.detokenize),
        get("/v1/models", plain.models),
        get("/v1/models/{name:path}", plain.model),
        get("/health", status.health),
        get("/ready", status.ready),
        get("/version", status.version),
        get("/metrics", status.metrics),
        get("/stats", status.stats),
        get("/openapi.json", _openapi),
        get("/docs", _docs),
        get("/", _chat),
    ]
    middleware = [Middleware(AroundRequests, service=service)]
    if origins := words(service.settings.allowed_origins):
        # Before the keys are looked at: a browser asks without one whether it may ask.
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            ),
        )
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_route}
    )


async def _no_route(request: Request, error: Exception) -> Response:
    """There is no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path:.200}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _openapi(service: Service, request: Request) -> Response:
    return json_response(openapi())


async def _docs(service: Service, request: Request) -> Response:
    return _html(docs_page())


async def _chat(service: Service, request: Request) -> Response:
    return _html(chat_page())


def _html(page: bytes) -> Response:
    headers = {"Content-Security-Policy": _CONTENT, "X-Content-Type-Options": "nosniff"}
    return Response(page, media_type="text/html", headers=headers)

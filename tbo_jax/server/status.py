"""How the server and its engine are: for probes, for Prometheus, and for the page at `/`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tbo_jax.server.errors import ApiError, json_response
from tbo_jax.server.metrics import cache_usage
from tbo_jax.server.service import Service
from tbo_jax.server.streams import EventStream, event

STATS_SECONDS = 0.5  # between two events
_TOLD = (  # of the engine's statistics, to pages
    *("steps", "steps_split", "steps_ahead", "generated_tokens", "prompt_tokens", "cached_tokens"),
    *("running", "waiting", "preemptions", "evictions", "pages", "free_pages", "step_seconds"),
    *("steps_by_bucket", "shapes", "shapes_compiled", "use_tbo", "devices", "platform"),
)


async def health(service: Service, request: Request) -> Response:
    """Whether the server is alive."""
    return json_response({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    """Whether it takes requests now."""
    if service.draining or not service.client.is_ready:
        raise ApiError(503, "the engine takes no requests now", headers={"Retry-After": "5"})
    return json_response({"status": "ready"})


async def version(service: Service, request: Request) -> Response:
    """The version of this program."""
    from tbo_jax import __version__

    return json_response({"version": __version__})


async def metrics(service: Service, request: Request) -> Response:
    """The page for Prometheus. An engine that does not answer has no metrics, the server has."""
    try:
        async with asyncio.timeout(5):
            statistics = await service.client.statistics()
    except (TimeoutError, RuntimeError):
        statistics = {}
    return Response(
        service.metrics.page(statistics),
        media_type="text/plain; version=0.0.4",
    )


async def stats(service: Service, request: Request) -> Response:
    """What the engine does now; with `?stream=1` again and again, as events."""
    if request.query_params.get("stream") not in ("1", "true"):
        return json_response(await _stats(service))

    async def close() -> None:
        pass

    return EventStream(_events(service), close)


async def _events(service: Service) -> AsyncIterator[bytes]:
    while not service.draining:
        yield event(await _stats(service))
        await asyncio.sleep(STATS_SECONDS)


async def _stats(service: Service) -> dict[str, Any]:
    statistics = await service.client.statistics()
    return {
        "time": time.time(),
        "model": service.names[0],
        "max_context": service.client.info.max_context,
        "has_chat_template": service.prompts.tokenizer.has_chat_template,
        "cache_usage": cache_usage(statistics),
        "queued_tokens": service.queue.tokens,
        **{name: statistics[name] for name in _TOLD if name in statistics},
    }

"""Files of the page at `/`, and the description of the API."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from tbo_jax.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)

POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatRequest, "Go on with a conversation"),
    "/v1/completions": (CompletionRequest, "Go on with a text"),
    "/v1/responses": (ResponsesRequest, "Answer, in the form of OpenAI's responses"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
GETS = {
    "/v1/models": "The model that is served",
    "/health": "Whether the engine is there",
    "/ready": "Whether requests are taken now",
    "/version": "Version of this program",
    "/metrics": "Counts and times for Prometheus",
    "/stats": "What the engine does now, once or (stream=1) as events",
}


@cache
def chat_page() -> bytes:
    """The page at `/`."""
    return (files(__package__) / "page" / "chat.html").read_bytes()


@cache
def openapi() -> dict[str, Any]:
    """The API in the form of OpenAPI 3.1."""
    from tbo_jax import __version__

    schemas, components = msgspec.json.schema_components(
        [kind for kind, _ in POSTS.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, (_, summary)), schema in zip(POSTS.items(), schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "Done"}, "400": {"description": "Refused"}},
            }
        }
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "Done"}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tbo_jax", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


@cache
def docs_page() -> bytes:
    """A page that lists the API."""
    spec = openapi()
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>API</title>",
        "<meta name=viewport content='width=device-width'>",
        "<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;"
        "margin:2rem auto;padding:0 1rem}code{font-family:ui-monospace,monospace}"
        "table{border-collapse:collapse}td,th{padding:.15rem 1rem .15rem 0;text-align:left;"
        "vertical-align:top}</style><h1>API</h1>",
        "<p>Form and meaning are OpenAI's; what is beside them is vLLM's. "
        "<a href=openapi.json>openapi.json</a> has all of it.</p>",
    ]
    for path, methods in spec["paths"].items():
        for method, one in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{one['summary']}.</p>")
            if "requestBody" in one:
                ref = one["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                schema = spec["components"]["schemas"][ref.rpartition("/")[2]]
                required = schema.get("required", [])
                rows = "".join(
                    f"<tr><td><code>{name}</code><td>{_kind(field)}"
                    f"<td>{'required' if name in required else ''}"
                    for name, field in schema["properties"].items()
                )
                parts.append(f"<table><tr><th>field<th>type<th>{rows}</table>")
    return "".join(parts).encode()


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return " or ".join(f"<code>{value}</code>" for value in field["enum"])
    kind = str(field.get("type", "any"))
    return f"{kind} of {_kind(field['items'])}" if field.get("items") else kind

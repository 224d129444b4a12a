"""Bodies of requests: read within limits, decoded strictly."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from tbo_jax.server.errors import ApiError, not_supported, refused
from tbo_jax.server.protocol import OF_ALL, UNSUPPORTED

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.S)
_MISSING = re.compile(r"missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.S)
_AT = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.S)


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """The bytes of a body.

    Raises:
        ApiError: it has more than `most` (413), takes longer than that (408), or is compressed.
        ClientDisconnect: nobody is there any more.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Content-Encoding is not supported: expected a body as it is")
    told = request.headers.get("content-length", "0")
    too_long = ApiError(
        413, f"the body is too long: expected at most {most} bytes", code="request_too_large"
    )
    if told.isdecimal() and int(told[:20]) > most:
        raise too_long
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise too_long
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} seconds") from None
    return b"".join(chunks)


def decode(body: bytes, kind: type[T]) -> T:
    """The struct in a body.

    Raises:
        ApiError: 400: no JSON, or not what is expected there; it names the field.
    """
    try:
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _of_field(str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    for name, why in (UNSUPPORTED.get(kind, {}) | OF_ALL).items():
        # What says no is as good as nothing.
        given = getattr(value, name, None)
        if given is not None and given is not False and given not in ([], {}):
            raise not_supported(name, why)
    return value


def _of_field(message: str) -> ApiError:
    if found := _UNKNOWN.search(message):
        name = _path(found[2], found[1])
        return refused(name, "is not a field that is known here", "unknown_parameter")
    if found := _MISSING.search(message):
        return refused(_path(found[2], found[1]), "is missing", "missing_required_parameter")
    if found := _AT.match(message):
        expected = found[1][:1].lower() + found[1][1:]
        return refused(found[2], f"has another value than expected: {expected:.300}")
    return ApiError(400, f"the body has another form than expected: {message:.300}")


def _path(within: str | None, name: str) -> str:
    return f"{within}.{name}" if within else name


async def body_of(request: Request, kind: type[T], most: int, seconds: float) -> T:
    """Read and decode a body; as `read_body` and `decode`."""
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media.lower() not in ("application/json", "text/json", ""):
        raise ApiError(415, f"Content-Type is {media:.80}: expected application/json")
    return decode(await read_body(request, most, seconds), kind)


__all__ = ["ClientDisconnect", "body_of", "decode", "read_body"]

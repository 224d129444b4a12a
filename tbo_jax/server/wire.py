"""Messages between API processes and the engine's process, over a local stream socket.

A frame is its length (4 bytes, little-endian) and msgpack. The first frame of each side is a
`Hello`, whose form never changes, so that programs of other versions tell each other so. Each
further frame is a list of messages: what comes of steps for a connection is one frame, with the
plain tokens of all its requests in three lists.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import msgspec

from tbo_jax.engine.scheduling.request import FinishReason
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.server.interface import ModelInfo, join

T = TypeVar("T")

PROTOCOL = 2  # changes with every message
MAX_FRAME = 2**28  # bytes; a longer one is no frame of ours
MAX_HELLO = 2**16  # bytes of the first
MAX_INTEGER = 2**63 - 1  # that msgpack has in both signs
_LONGEST_PATH = 107  # bytes of a Unix socket's path on Linux
_LENGTH = struct.Struct("<I")


class WireError(ValueError):
    """The other side is not what was expected, or sends what is no message."""


class Hello(msgspec.Struct, frozen=True):
    """What each side says first. The engine's tells of the model, or why it refuses the other."""

    protocol: int
    run: str = ""  # of the engine: another one after each start
    info: ModelInfo | None = None
    refused: str | None = None


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Run a prompt once (`n` is 1)."""

    number: int  # which updates name; of the client's choice, not that of an unfinished request
    token_ids: list[int]
    params: dict[str, Any]  # as `packed_params` gives them
    salt: str = ""
    priority: int = 0
    tells_tokens: bool = True
    generated: list[int] = []  # that an earlier run of the engine gave for it


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request; nothing more is told of it."""

    number: int


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Tell the statistics, and with `check` whether the books of pages and tokens add up."""

    check: bool = False


class Turn(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """Ask for the turn to try a suspect, or give it up or back. `YourTurn` is the answer."""

    wanted: bool


class Told(msgspec.Struct, array_like=True):
    """What came of a request since the last one: tokens, what ends it, or why it was refused."""

    number: int
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    refused: str | None = None  # the engine does not take it; nothing else is set
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def join(self, later: Told) -> None:
        """Go on with what came later of the same request."""
        join(self, later)
        self.refused = later.refused


class Step(msgspec.Struct, array_like=True, tag="step"):
    """What steps gave: request `numbers[i]` got a token and text, nothing else; then the others.

    Of a request that is in both the first comes first.
    """

    numbers: list[int] = []
    token_ids: list[int] = []
    texts: list[str] = []
    others: list[Told] = []


class Statistics(msgspec.Struct, frozen=True, array_like=True, tag="statistics"):
    """The answer to `Ask`; answers come in the order of the questions."""

    values: dict[str, Any]


class YourTurn(msgspec.Struct, frozen=True, array_like=True, tag="your turn"):
    """No other client tries a suspect until `Turn` gives the turn back."""


ToEngine = Add | Abort | Ask | Turn
ToClient = Step | Statistics | YourTurn

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_to_client = msgspec.msgpack.Decoder(list[ToClient])
_hello = msgspec.msgpack.Decoder(Hello)

_DEFAULTS = {
    field.name: field.default for field in fields(SamplingParams) if field.default is not MISSING
}


def packed_params(params: SamplingParams) -> dict[str, Any]:
    """What of them is not the default.

    Raises:
        ValueError: a number is larger than `MAX_INTEGER`.
    """
    given = {name: getattr(params, name) for name in _DEFAULTS}
    packed = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    for name, value in packed.items():
        if isinstance(value, int) and value > MAX_INTEGER:
            raise ValueError(f"SamplingParams.{name} is {value}: expected at most {MAX_INTEGER}")
    return packed


def unpacked_params(packed: dict[str, Any]) -> SamplingParams:
    """What `packed_params` took apart.

    Raises:
        ValueError: they are no such params.
    """
    try:
        return SamplingParams(**packed)
    except TypeError as error:
        raise ValueError(f"SamplingParams: {error}") from error


def frame(message: Hello | Sequence[ToEngine | ToClient]) -> bytes:
    """A frame of a first message, or of a list of later ones.

    Raises:
        WireError: it is longer than `MAX_FRAME`.
    """
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > MAX_FRAME:
        raise WireError(f"a message has {size} bytes: expected at most {MAX_FRAME}")
    _LENGTH.pack_into(buffer, 0, size)
    return bytes(buffer)


def _decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"a message of {len(payload)} bytes is none of ours: {error}") from error


def read_hello(payload: bytes) -> Hello:
    """The first message of the other side.

    Raises:
        WireError: it is none, the other side speaks another version, or it refuses this one.
    """
    hello = _decoded(_hello, payload)
    if hello.refused is not None:
        raise WireError(hello.refused)
    if hello.protocol != PROTOCOL:
        raise WireError(
            f"the other process speaks version {hello.protocol} of the engine's protocol: "
            f"expected {PROTOCOL}; are API and engine of the same release?"
        )
    return hello


def read_to_engine(payload: bytes) -> list[ToEngine]:
    """Messages of a client. Raises WireError if they are none."""
    return _decoded(_to_engine, payload)


def read_to_client(payload: bytes) -> list[ToClient]:
    """Messages of the engine. Raises WireError if they are none."""
    return _decoded(_to_client, payload)


def check_path(path: str) -> None:
    """ValueError for the path of a socket that is too long for the system."""
    size = len(os.fsencode(path))
    if size > _LONGEST_PATH:
        raise ValueError(
            f"{path}: a socket's path has at most {_LONGEST_PATH} bytes, this one has {size}"
        )


class Frames:
    """Cuts what comes from a socket into the payloads of frames, a `Hello` being the first."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._most = MAX_HELLO

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are whole with these bytes.

        Raises:
            WireError: the first is longer than `MAX_HELLO`, or another one than `MAX_FRAME`.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._buffer, start)
                if size > self._most:
                    raise WireError(f"a message has {size} bytes: expected at most {self._most}")
                end = start + _LENGTH.size + size
                if len(self._buffer) < end:
                    return
                payload = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
                start, self._most = end, MAX_FRAME
                yield payload
        finally:
            del self._buffer[:start]

"""What a supervisor and the engine's process tell each other, over a socket that only they have.

The supervisor says how to start, and then nothing: when its end closes the engine's process ends.
The engine's process tells how it is in lines of JSON, at least one in each `BEAT_SECONDS`.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Literal

import msgspec

from tbo_jax.engine.config import EngineConfig

BEAT_SECONDS = 0.5

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Hosts:
    """The group of engines that run one model on several hosts; as `parallel.processes.connect`."""

    coordinator: str
    num_processes: int | None = None
    process_id: int | None = None


@dataclass(frozen=True)
class EngineStart:
    """How to start the engine's process."""

    model: str
    config: EngineConfig
    socket_path: str  # where API processes find it; of several hosts the first's counts
    hosts: Hosts | None = None
    show_progress: bool = False
    stream_interval: float = 0.0


class Beat(msgspec.Struct, frozen=True):
    """How the engine's process is."""

    state: Literal["loading", "ready", "failed"]
    tokens: int = 0  # told so far
    busy: float = 0.0  # seconds that the step under way takes already
    error: str = ""  # with "failed", why
    refused: bool = False  # with "failed": another start with these options would fail, too


def send_start(end: socket.socket, start: EngineStart) -> None:
    """Tell a process that was just started what to do."""
    data = pickle.dumps(start)
    end.sendall(_LENGTH.pack(len(data)) + data)


def read_start(end: socket.socket) -> EngineStart:
    """What this process is to do.

    Raises:
        EOFError: the supervisor is gone.
    """
    (size,) = _LENGTH.unpack(_read(end, _LENGTH.size))
    start = pickle.loads(_read(end, size))
    assert isinstance(start, EngineStart)
    return start


def _read(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise EOFError("the supervisor is gone")
        data += part
    return data


def line(beat: Beat) -> bytes:
    """A beat as it is sent."""
    return msgspec.json.encode(beat) + b"\n"


def read_line(data: bytes) -> Beat:
    """What `line` made."""
    return msgspec.json.decode(data, type=Beat)

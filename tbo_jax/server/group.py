"""The engines of several hosts: the first takes requests, and the others do as it does.

Each step of each of them is planned from the same requests, added and ended in the same order. So
before each step the first sends to the others what was added and ended since the last one. Nothing
comes back: that a step was run is known from its collectives. A connection that ends means that a
process is dead, and with it the group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import msgspec

from tbo_jax.engine.engine import Engine
from tbo_jax.host.command import FAILED
from tbo_jax.parallel.processes import from_first, is_first
from tbo_jax.server import wire
from tbo_jax.server.engine_loop import add_to, drop

JOIN_SECONDS = 60.0  # until the others have come


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """What the others do before their next step, and whether they run one."""

    orders: list[wire.Add | wire.Abort]
    step: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Orders)


class Leader:
    """The first process: sends orders to the others."""

    def __init__(self, others: list[socket.socket]) -> None:
        """Args:
        others: a connection to each.
        """
        self._others = others
        for other in others:
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()

    def send(self, orders: list[wire.Add | wire.Abort], step: bool) -> None:
        """Have the others do this; it waits only if they are far behind."""
        data = _encoder.encode(Orders(orders, step))
        framed = len(data).to_bytes(4, "little") + data
        for other in self._others:
            other.sendall(framed)

    def _watch(self, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while other.recv(1024):
                pass
        _end("another process of the group is gone")


def join_group(coordinator: str) -> Leader | socket.socket:
    """Connect the processes: the first one's end, or that of another, for `Follower`.

    Args:
        coordinator: HOST:PORT of the first process, or "auto".

    Raises:
        OSError: they do not reach each other in `JOIN_SECONDS`.
        ValueError: somebody else connected.
    """
    token = secrets.token_bytes(16)
    if is_first():
        host = coordinator.rpartition(":")[0].strip("[]") or socket.gethostname()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
        local = host in ("localhost", "127.0.0.1", "::1")
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host if local else everywhere, 0))
            listener.listen()
            listener.settimeout(JOIN_SECONDS)
            from_first((host, listener.getsockname()[1], token))
            others: list[socket.socket] = []
            while len(others) < jax.process_count() - 1:
                other, _ = listener.accept()
                other.settimeout(JOIN_SECONDS)
                if not secrets.compare_digest(_read(other, len(token)), token):
                    other.close()  # a stranger
                    continue
                other.settimeout(None)
                other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                others.append(other)
        return Leader(others)
    told: Any = from_first(None)
    *address, token = told
    end = socket.create_connection(tuple(address), JOIN_SECONDS)
    end.sendall(token)
    end.settimeout(None)
    return end


class Follower:
    """Another process: does what the first does.

    Attributes:
        busy_since, num_tokens: as `EngineLoop` has them.
    """

    def __init__(self, engine: Engine, leader: socket.socket) -> None:
        """Args:
        engine: nobody else uses it.
        leader: as `join_group` gives it.
        """
        self.busy_since: float | None = None
        self.num_tokens = 0
        self._engine = engine
        self._leader = leader

    def run(self) -> None:
        """Do it until the first is gone; then this process ends, too."""
        engine = self._engine
        for orders in _orders(self._leader):
            for order in orders.orders:
                if isinstance(order, wire.Add):
                    with contextlib.suppress(ValueError):  # the first has told who asked
                        add_to(engine, order, wire.unpacked_params(order.params))
                else:
                    drop(engine, order.number)
            if not orders.step:
                continue
            self.busy_since = time.monotonic()
            events = engine.step()
            self.busy_since = None
            self.num_tokens += len(events)
            for event in events:
                if event.finish_reason is not None:
                    assert event.request_id is not None
                    engine.pop(event.request_id)


def _orders(leader: socket.socket) -> Iterator[Orders]:
    """What the first sends."""
    arrived: list[bytes] = []
    changed = threading.Condition()

    def read_all() -> None:
        # In a thread, so that the end of the first is seen while a step waits for it.
        while size := _read(leader, 4):
            data = _read(leader, int.from_bytes(size, "little"))
            if not data:
                break
            with changed:
                arrived.append(data)
                changed.notify()
        _end("the first process of the group is gone")

    threading.Thread(target=read_all, name="tbo_jax orders", daemon=True).start()
    while True:
        with changed:
            changed.wait_for(lambda: arrived)
            batch, arrived[:] = list(arrived), []
        for data in batch:
            yield _decoder.decode(data)


def _read(end: socket.socket, size: int) -> bytes:
    """So many bytes; none if the other side is gone."""
    data = bytearray()
    with contextlib.suppress(OSError):
        while len(data) < size:
            part = end.recv(min(size - len(data), 1 << 20))
            if not part:
                return b""
            data += part
        return bytes(data)
    return b""


def _end(reason: str) -> None:
    """End this process at once: its other threads may wait for a dead one in a collective."""
    print(f"engine process {jax.process_index()}: {reason}", file=sys.stderr, flush=True)
    os._exit(FAILED)

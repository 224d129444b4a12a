"""Connections: heads that never end or are too long, bodies that do not come, and idle ones."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack, suppress

import httpx
import pytest
from fakes import MODEL, ScriptedClient, make_service
from serving import serving

from tbo_jax.server.run import raise_file_limit
from tbo_jax.server.settings import Limits, ServerSettings

BODY = b'{"prompt": "In", "max_tokens": 3}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def address():
    limits = Limits(
        header_seconds=0.5, body_seconds=0.5, keep_alive_seconds=3, max_header_bytes=4096
    )
    with serving(make_service(ScriptedClient(MODEL), limits=limits)) as (address, _):
        yield address


def connect(address):
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    return connection


def answer(connection):
    """All that comes until the server closes, or there is a whole answer."""
    data = b""
    while b"\r\n\r\n" not in data and (more := connection.recv(1 << 16)):
        data += more
    return data


def test_slow_heads_end(address):
    with connect(address) as connection:
        start = time.monotonic()
        connection.sendall(HEAD)
        assert answer(connection).startswith(b"HTTP/1.1 408")
        assert 0.3 < time.monotonic() - start < 5
    with connect(address) as connection:  # one letter at a time does not help
        start = time.monotonic()
        try:
            for letter in HEAD[:40]:
                connection.sendall(bytes([letter]))
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - start < 5
        with suppress(ConnectionError):
            assert answer(connection)[:12] in (b"", b"HTTP/1.1 408")
    with connect(address) as connection:  # so does the second head of a connection
        for _ in range(2):
            connection.sendall(WHOLE)
            assert answer(connection).startswith(b"HTTP/1.1 200")
            time.sleep(0.7)  # idle for longer than a head may take
        connection.sendall(HEAD)
        assert answer(connection).startswith(b"HTTP/1.1 408")


def test_slow_bodies_end(address):
    with connect(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert answer(connection).startswith(b"HTTP/1.1 408")


def test_long_heads_are_refused(address):
    with connect(address) as connection:
        try:
            for _ in range(64):
                connection.sendall(b"X-Y: " + b"z" * 1000 + b"\r\n" if _ else HEAD)
            status = answer(connection)[:12]
        except ConnectionError:
            status = b""
        assert status in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")


def test_idle_connections_hold_up_nobody(address):
    raise_file_limit()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(2000, files // 3)  # each has an end here and one there
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(address)) for _ in range(count)]
        for connection in idle[:100]:
            connection.sendall(b"POST /v1")
        done = httpx.post(f"{address}/v1/completions", json={"prompt": "In", "max_tokens": 3})
        assert done.status_code == 200
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def test_settings_are_checked():
    with pytest.raises(ValueError, match="header_seconds is 0: expected more than 0"):
        Limits(header_seconds=0)
    with pytest.raises(ValueError, match="max_samples"):
        Limits(max_samples=0)
    settings = ServerSettings(api_key=(("a", "b"), ("c",)))
    assert settings.keys("d") == ("a", "b", "c")
    assert ServerSettings().keys("d, e") == ("d", "e") and ServerSettings().keys(None) == ()
    with pytest.raises(ValueError, match="API key is empty"):
        ServerSettings(api_key=(("",),)).keys(None)

"""The port and uvicorn, and an end in which no request is cut off early."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from tbo_jax.server.connection import connection_class
from tbo_jax.server.service import Service

logger = logging.getLogger(__name__)

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; they wait until somebody answers them.

    Raises:
        ValueError: the port is in use, or there is no such host or port.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"--port is {port}: expected from 0 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"--host is {host!r}: {error}") from error
    listening = socket.socket(family, kind, proto)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use: expected a free one (--port)"
            ) from error
        raise ValueError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return listening


class Server(uvicorn.Server):
    """uvicorn, which tells the service when it is to end, and ends the engine after the requests.

    Args:
        app: of the service.
        service: what is served.
    """

    def __init__(self, app: Starlette, service: Service) -> None:
        limits, seconds = service.limits, service.settings.shutdown_seconds
        config = uvicorn.Config(
            app,
            http=connection_class(limits.max_header_bytes, limits.header_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=limits.keep_alive_seconds,
            timeout_graceful_shutdown=math.ceil(seconds),
            h11_max_incomplete_event_size=limits.max_header_bytes,
        )
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as the word to end, and do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to end, and at the second word do so at once."""
        self.stop(at_once=self.should_exit)

    def stop(self, at_once: bool = False) -> None:
        """Begin to end: take no new requests. `at_once` waits for none of those under way."""
        self._service.draining = True
        self.should_exit = True
        self.force_exit = self.force_exit or at_once

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections, those under way within the time limit, then the engine."""
        logger.info("ending: requests under way have %g s", self._service.settings.shutdown_seconds)
        await super().shutdown(sockets)
        await self._service.client.close()
        self._service.prompts.close()


def raise_file_limit() -> None:
    """Allow as many connections as the system lets this process have."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has such limits
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

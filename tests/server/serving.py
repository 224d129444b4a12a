"""A server in a thread of this process, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from tbo_jax.server.app import make_app
from tbo_jax.server.run import Server, listen
from tbo_jax.server.service import Service


@contextlib.contextmanager
def serving(service: Service) -> Iterator[tuple[str, Server]]:
    """Its address, such as http://127.0.0.1:1234, and the server."""
    listening = listen("127.0.0.1", 0)
    server = Server(make_app(service), service)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve(sockets=[listening]))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        server.stop()
        thread.join(60)
        listening.close()
    assert not thread.is_alive() and not failed, failed

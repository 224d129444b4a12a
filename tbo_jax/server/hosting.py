"""A server on this host: the engine in a process of its own, the API here or in worker processes.

    this process -- supervises --> the engine's process <-- socket -- the API

With one worker the API runs in this process. With several this process only watches: each of them
takes connections of the same listening socket, and has its own connection to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace

from tbo_jax.engine.config import EngineConfig
from tbo_jax.server.app import make_app
from tbo_jax.server.control import Hosts
from tbo_jax.server.event_loop import new_event_loop
from tbo_jax.server.remote import RemoteClient
from tbo_jax.server.run import Server, raise_file_limit
from tbo_jax.server.service import Service
from tbo_jax.server.settings import ServerSettings
from tbo_jax.server.supervisor import EngineFailed, Supervisor

logger = logging.getLogger(__name__)

WORKER_SECONDS = 1.0  # between two starts of a worker that dies


@dataclass(frozen=True)
class Serving:
    """What is served, and how; all that a process of the API needs to know."""

    model: str  # its name where the settings give none
    settings: ServerSettings
    keys: tuple[str, ...] = ()
    engine: str = ""  # path of the engine's socket
    quiet: bool = False


def host(
    listening: socket.socket | None,
    serving: Serving,
    config: EngineConfig,
    hosts: Hosts | None = None,
) -> None:
    """Run engine and API until a signal ends them.

    Args:
        listening: where requests come; None on hosts that have no API.
        serving: what is served.
        config: of the engine.
        hosts: the group of engines, where there are several hosts.

    Raises:
        EngineFailed: the engine does not come up, or is given up.
        ValueError: something is wrong with the tokenizer or the chat template.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_host(listening, serving, config, hosts))


async def _host(
    listening: socket.socket | None, serving: Serving, config: EngineConfig, hosts: Hosts | None
) -> None:
    failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
    supervisor = Supervisor(
        serving.model,
        config,
        hosts=hosts,
        step_timeout=serving.settings.step_timeout,
        on_failure=failed.set_result,
        show_progress=not serving.quiet,
        stream_interval=serving.settings.stream_interval,
    )
    serving = replace(serving, engine=supervisor.path)
    try:
        await supervisor.start()
        if listening is None:
            logger.info("the engine of this host is one of a group; the first host has the API")
            await supervisor.wait()
        elif serving.settings.api_workers == 1:
            await serve_api(listening, serving, failed)
        else:
            await _Workers(listening, serving, failed).run()
    finally:
        await supervisor.stop()
    if failed.done():
        raise failed.result()


async def serve_api(
    listening: socket.socket, serving: Serving, failed: asyncio.Future[EngineFailed] | None = None
) -> None:
    """Answer requests in this process, until a signal ends it or the engine has `failed` for good.

    Raises:
        ValueError: something is wrong with the tokenizer or the chat template.
    """
    client = RemoteClient(serving.engine)
    await client.wait_ready()
    service = await asyncio.to_thread(
        Service, client, serving.model, serving.settings, serving.keys
    )
    server = Server(make_app(service), service)

    def end(given_up: asyncio.Future[EngineFailed]) -> None:
        if not given_up.cancelled():
            client.fail(str(given_up.result()))
            server.stop(at_once=True)

    if failed is not None:
        failed.add_done_callback(end)
    address, port = listening.getsockname()[:2]
    logger.info("%s is served at http://%s:%d", service.names[0], address, port)
    await server.serve(sockets=[listening])


class _Workers:
    """Processes of the API. One that dies is started anew; its connections are lost with it."""

    def __init__(
        self, listening: socket.socket, serving: Serving, failed: asyncio.Future[EngineFailed]
    ) -> None:
        count = serving.settings.api_workers
        self._listening = listening
        limits = serving.settings.limits
        if limits.max_queued_tokens is not None:  # it is of all of them
            limits = replace(limits, max_queued_tokens=-(-limits.max_queued_tokens // count))
        self._serving = replace(serving, settings=replace(serving.settings, limits=limits))
        self._count = count
        self._failed = failed
        self._stopping = asyncio.Event()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._metrics = tempfile.mkdtemp(prefix="tbo-jax-metrics-")

    async def run(self) -> None:
        """Run them until a signal ends them, or the engine failed for good."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self._failed.add_done_callback(lambda _: self._stop(at_once=True))
        address, port = self._listening.getsockname()[:2]
        logger.info("%d API processes listen at http://%s:%d", self._count, address, port)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._keep_running())
        finally:
            for process in self._processes:
                process.kill()
            shutil.rmtree(self._metrics, ignore_errors=True)

    def _stop(self, at_once: bool = False) -> None:
        """End them; told a second time, or `at_once`, they wait for no requests under way."""
        self._stopping.set()
        for process in self._processes:
            for _ in range(1 + at_once):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()

    async def _keep_running(self) -> None:
        while not self._stopping.is_set():
            process = self._start()
            self._processes.add(process)
            status = await asyncio.to_thread(process.wait)
            self._processes.discard(process)
            if self._stopping.is_set():
                return
            logger.error("an API process ended with status %d; it is started anew", status)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORKER_SECONDS):
                    await self._stopping.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        fd = self._listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "tbo_jax.server.api_process", str(fd), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[fd],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": self._metrics},
            start_new_session=True,  # signals of the terminal come from here
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(pickle.dumps(self._serving))
        return process

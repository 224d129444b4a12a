"""Starts the engine's process, watches it, and starts it anew when it dies.

What it was running is not lost: clients send it again (`RemoteClient`). The first start is another
matter: an engine that does not come up then, because of its model or its options, would not do so a
second time either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec

from tbo_jax.engine.config import EngineConfig
from tbo_jax.host.command import FAILED, REFUSED
from tbo_jax.server.control import Beat, EngineStart, Hosts, read_line, send_start

logger = logging.getLogger(__name__)

STEP_TIMEOUT = 300.0  # seconds
START_SECONDS = 300.0  # until the process says that it loads: Python may come over a network
MOST_FAILURES = 10  # more than a client takes to give up a request that is the reason
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the second restart in a row, and any later
STEADY_SECONDS = 60.0  # without work, after which an engine counts as one that works
END_SECONDS = 10.0  # that a process which is told to end has for it


class EngineFailed(RuntimeError):
    """The engine is given up. `exit_code` is for the command that started it."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Supervisor:
    """Keeps an engine's process running, for the event loop of the main thread.

    Attributes:
        restarts: how often the engine was started anew.
        path: of the socket where clients find it.
        pid: of the process that runs; None between two.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        hosts: Hosts | None = None,
        path: str | None = None,
        step_timeout: float = STEP_TIMEOUT,
        most_failures: int = MOST_FAILURES,
        on_failure: Callable[[EngineFailed], None] | None = None,
        show_progress: bool = False,
        stream_interval: float = 0.0,
    ) -> None:
        """Args:
        model: as `LLM` takes it.
        config: of the engine.
        hosts: the group of engines that this one is part of, where there are several hosts.
        path: where the engine listens; default a socket in a new folder of the system's temporary
            ones, which only this user can read.
        step_timeout: seconds that a step may take, or the process may give no sign of life, before
            it is killed.
        most_failures: in a row, of engines that told no token and did not run for
            `STEADY_SECONDS`, after which it is given up.
        on_failure: called when it is given up after the first start went well.
        show_progress: have the engine show on stderr how far it is when it starts.
        stream_interval: as `EngineLoop` takes it.

        Raises:
            ValueError: a number is not above 0.
        """
        for name, value in (("step_timeout", step_timeout), ("most_failures", most_failures)):
            if not value > 0:
                raise ValueError(f"{name} is {value!r}: expected a number above 0")
        self._folder = tempfile.mkdtemp(prefix="tbo-jax-") if path is None else None
        self.path = path or f"{self._folder}/engine"
        self.step_timeout = step_timeout
        self.most_failures = most_failures
        self.restarts = 0
        self.pid: int | None = None
        self._start = EngineStart(
            os.fspath(model), config or EngineConfig(), self.path, hosts, show_progress,
            stream_interval,
        )  # fmt: skip
        self._on_failure = on_failure
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, and wait until it is ready.

        Raises:
            EngineFailed: it does not come up; with the reason, in one line.
        """
        self._task = asyncio.create_task(self._keep_running())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.stop()
            raise
        finally:
            ready.cancel()
        if self._task.done():
            self._remove_folder()
            self._task.result()

    async def wait(self) -> None:
        """Wait until it is stopped.

        Raises:
            EngineFailed: the engine is given up.
        """
        assert self._task is not None, "start it before"
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End the engine's process now. Clients are to be closed before, with the time they need.

        Whoever has no event loop any more just ends: the engine does not outlive this process.
        """
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineFailed):
                await self._task
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            reason, refused, made_progress = await self._run_once()
            failures = 1 if made_progress else failures + 1
            failed: EngineFailed | None = None
            if not self._was_ready:
                failed = EngineFailed(reason, REFUSED if refused else FAILED)
            elif failures >= self.most_failures:
                failed = EngineFailed(
                    f"the engine is given up after {failures} failures in a row: {reason}", FAILED
                )
            if failed is not None:
                if self._was_ready and self._on_failure is not None:
                    self._on_failure(failed)
                raise failed
            self.restarts += 1
            wait = 0.0 if failures == 1 else min(FIRST_WAIT * 2 ** (failures - 2), LONGEST_WAIT)
            logger.error("%s; it is started anew%s", reason, f" in {wait:g} s" if wait else "")
            await asyncio.sleep(wait)

    async def _run_once(self) -> tuple[str, bool, bool]:
        """Start a process and watch it until its end.

        Returns:
            Why it ended, whether another would end the same way, and whether it made progress.
        """
        mine, its = socket.socketpair()
        with its:
            self._process = process = subprocess.Popen(
                [
                    sys.executable, "-m", "tbo_jax.server.engine_process",
                    str(its.fileno()), str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )  # fmt: skip
        self.pid = process.pid
        writer: asyncio.StreamWriter | None = None
        try:
            send_start(mine, self._start)
            reader, writer = await asyncio.open_connection(sock=mine)
            last, reason, was_ready = await self._watch(reader)
        except BrokenPipeError:
            last, reason, was_ready = Beat("loading"), None, None
        finally:
            if writer is None:
                mine.close()
            else:
                writer.close()
            await asyncio.shield(asyncio.create_task(self._reap(process)))
        if reason is None:
            reason = last.error or _ended(process.returncode, last)
        steady = was_ready is not None and time.monotonic() - was_ready > STEADY_SECONDS
        return reason, last.refused, last.tokens > 0 or steady

    async def _watch(self, reader: asyncio.StreamReader) -> tuple[Beat, str | None, float | None]:
        """Read beats until the process ends or is killed.

        Returns:
            The last beat; why it was killed, if it was; and when it was ready, if it was.
        """
        beat, ready_at = Beat("loading"), None
        seconds = max(START_SECONDS, self.step_timeout)
        while True:
            try:
                async with asyncio.timeout(seconds):
                    data = await reader.readline()
            except TimeoutError:
                self._kill()
                return beat, f"the engine gave no sign of life for {seconds:g} s", ready_at
            except ConnectionError:
                data = b""
            if not data.endswith(b"\n"):
                return beat, None, ready_at
            seconds, before = self.step_timeout, beat
            beat = read_line(data)
            if beat.state == "failed":
                beat = msgspec.structs.replace(beat, tokens=before.tokens)
            if beat.state == "ready" and ready_at is None:
                ready_at = time.monotonic()
                self._was_ready = True
                self._ready.set()
            if beat.busy > self.step_timeout:
                self._kill()
                return beat, f"a step took more than {self.step_timeout:g} s", ready_at

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a process whose control socket is closed; it ends by itself then."""
        end = time.monotonic() + END_SECONDS
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
            await asyncio.sleep(0.01)
        self.pid = None


def _ended(status: int, last: Beat) -> str:
    when = " while it loaded" if last.state == "loading" else ""
    if status >= 0:
        return f"the engine's process ended with status {status}{when}"
    name = signal.Signals(-status).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the engine's process was ended by {name}{when}{hint}"

"""The engine's process: loads the model, listens for API processes, and runs the device's loop.

A supervisor starts it, and it does not outlive that. Signals that a terminal or a service manager
sends to all processes leave it alone: the supervisor ends it when its requests are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid

import jax

from tbo_jax.engine.llm import LLM
from tbo_jax.host.command import FAILED, REFUSED
from tbo_jax.host.parent import die_with
from tbo_jax.parallel.processes import connect
from tbo_jax.server.control import BEAT_SECONDS, Beat, EngineStart, line, read_start
from tbo_jax.server.engine_loop import EngineLoop, Group
from tbo_jax.server.engine_server import EngineServer
from tbo_jax.server.event_loop import new_event_loop
from tbo_jax.server.group import Follower, Leader, join_group
from tbo_jax.server.interface import ModelInfo

logger = logging.getLogger(__name__)


class _Pulse:
    """Tells the supervisor how this process is, from a thread, and ends with it."""

    def __init__(self, end: socket.socket) -> None:
        self.loop: EngineLoop | Follower | None = None  # once it is ready
        self.is_ready = False
        self._end = end
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="tbo_jax pulse", daemon=True).start()
        threading.Thread(target=self._wait_for_end, name="tbo_jax parent", daemon=True).start()

    def now(self) -> None:
        """Tell it at once."""
        loop, beat = self.loop, Beat("ready" if self.is_ready else "loading")
        if loop is not None:
            since = loop.busy_since
            busy = 0.0 if since is None else time.monotonic() - since
            beat = Beat(beat.state, loop.num_tokens, busy)
        self._send(beat)

    def fail(self, error: BaseException, status: int) -> None:
        """Tell why this process ends, and end it; its threads may hang in a collective."""
        first, _, rest = str(error).partition("\n")
        named = first if status == REFUSED else f"{type(error).__name__}: {first}"
        self._send(Beat("failed", error=named + " ..." * bool(rest), refused=status == REFUSED))
        sys.stderr.flush()
        os._exit(status)

    def _send(self, beat: Beat) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._end.sendall(line(beat))

    def _beat(self) -> None:
        while True:
            self.now()
            time.sleep(BEAT_SECONDS)

    def _wait_for_end(self) -> None:
        with contextlib.suppress(OSError):
            while self._end.recv(1024):
                pass
        os._exit(FAILED)


def main() -> None:
    """Run as `python -m tbo_jax.server.engine_process FD PARENT`: the control socket, whose it is.

    What it prints to stdout goes to stderr: libraries of transports print there.
    """
    fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=fd)
    start = read_start(end)
    pulse = _Pulse(end)
    try:
        _run(start, pulse)
    except (ValueError, TypeError, ImportError, OSError) as error:
        pulse.fail(error, FAILED if pulse.is_ready else REFUSED)
    except BaseException as error:
        if not isinstance(error, jax.errors.JaxRuntimeError) or pulse.is_ready:
            traceback.print_exc()
        pulse.fail(error, FAILED)


def _run(start: EngineStart, pulse: _Pulse) -> None:
    hosts = start.hosts
    if hosts is not None:
        connect(hosts.coordinator, hosts.num_processes, hosts.process_id)
    llm = LLM(start.model, start.config, show_progress=start.show_progress, served=True)
    # What is here stays: the collector of garbage need not look at it again.
    gc.collect()
    gc.freeze()
    group: Group | None = None
    if jax.process_count() > 1:
        assert hosts is not None
        joined = join_group(hosts.coordinator)
        if not isinstance(joined, Leader):
            follower = pulse.loop = Follower(llm.engine, joined)
            pulse.is_ready = True
            follower.run()
            return
        group = joined
    loop = pulse.loop = EngineLoop(llm, group, pulse.now, start.stream_interval)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(llm, start.socket_path, pulse, loop))


async def _serve(llm: LLM, path: str, pulse: _Pulse, loop: EngineLoop) -> None:
    def run() -> None:
        try:
            loop.run()
        except BaseException as error:
            pulse.fail(error, FAILED)

    server = EngineServer(loop, llm.engine, ModelInfo.of(llm), uuid.uuid4().hex)
    listening = await server.listen(path)
    threading.Thread(target=run, name="tbo_jax engine", daemon=True).start()
    pulse.is_ready = True
    pulse.now()
    async with listening:
        await listening.serve_forever()


if __name__ == "__main__":
    main()

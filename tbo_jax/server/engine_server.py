"""The engine's socket: connections of API processes, each with what it has not read yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from tbo_jax.engine.engine import Engine
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.server import wire
from tbo_jax.server.engine_loop import EngineLoop
from tbo_jax.server.interface import ModelInfo

logger = logging.getLogger(__name__)

UNREAD_BYTES = 1 << 20  # written to a connection and not read; then updates are joined
JOINED = 16  # requests in a frame with joined updates
COMPILERS = 2  # threads that compile grammars, so that the device's loop need not


class EngineServer:
    """Listens for API processes, and hands what they ask for to the loop."""

    def __init__(self, loop: EngineLoop, engine: Engine, info: ModelInfo, run: str) -> None:
        """Args:
        loop: runs the engine.
        engine: compiles grammars.
        info: what clients are told of the model.
        run: what this start of the engine is called.
        """
        self.loop = loop
        self.engine = engine
        self.hello = wire.Hello(wire.PROTOCOL, run, info)
        self.compilers = ThreadPoolExecutor(COMPILERS, "tbo_jax grammars")
        self._turns: deque[_Connection] = deque()  # the first has its turn to try a suspect

    async def listen(self, path: str) -> asyncio.Server:
        """Take connections, from processes of the same user.

        Raises:
            ValueError: another process listens there, or the path is too long.
        """
        wire.check_path(path)
        with (
            contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.connect(path)
            raise ValueError(f"{path}: an engine listens there already")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            running = asyncio.get_running_loop()
            return await running.create_unix_server(partial(_Connection, self, running), path)
        finally:
            os.umask(before)

    def queue(self, connection: _Connection) -> None:
        """Give a connection the turn to try a suspect, when those that asked before had it."""
        if connection not in self._turns:
            self._turns.append(connection)
            if len(self._turns) == 1:
                connection.answer(wire.YourTurn())

    def unqueue(self, connection: _Connection) -> None:
        """Take its turn, or its place in the queue; the next has its turn then."""
        if connection not in self._turns:
            return
        had_it = self._turns[0] is connection
        self._turns.remove(connection)
        if had_it and self._turns:
            self._turns[0].answer(wire.YourTurn())


class _Connection(asyncio.Protocol):
    """One client. It is a `Receiver`: the loop's thread calls `tell`, all else is the socket's."""

    def __init__(self, server: EngineServer, running: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._asyncio = running
        self._frames = wire.Frames()
        self._greeted = False
        self._paused = False  # the client does not read
        self._unread: dict[int, wire.Told] = {}  # by request, while it does not
        self._answers: list[wire.ToClient] = []
        self._compiling: set[int] = set()  # requests whose grammar is not ready
        self._tasks: set[asyncio.Task[None]] = set()  # that compile them

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                if not self._greeted:
                    wire.read_hello(payload)
                    self._transport.write(wire.frame(self._server.hello))
                    self._greeted = True
                    continue
                for message in wire.read_to_engine(payload):
                    self._obey(message)
        except wire.WireError as error:
            logger.warning("a client was turned away: %s", error)
            self._transport.write(wire.frame(wire.Hello(wire.PROTOCOL, refused=str(error))))
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._compiling.clear()
        self._server.unqueue(self)
        self._server.loop.drop(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        messages, self._answers = self._answers, []
        unread, self._unread = list(self._unread.values()), {}
        # Few in a frame: with log-probabilities of prompts one may have megabytes.
        parts = (unread[at : at + JOINED] for at in range(0, len(unread), JOINED))
        for message in (*messages, *(wire.Step(others=part) for part in parts)):
            self.answer(message)  # which keeps it, if the client is slow again

    def tell(self, message: wire.ToClient) -> None:
        """Send a message; called in the loop's thread."""
        with contextlib.suppress(RuntimeError):  # this process ends
            self._asyncio.call_soon_threadsafe(self.answer, message)

    def answer(self, message: wire.ToClient) -> None:
        """Send a message; called in the socket's thread."""
        if self._transport.is_closing():
            return
        if not self._paused:
            self._transport.write(wire.frame([message]))
        elif isinstance(message, wire.Step):
            self._keep(message)
        else:
            self._answers.append(message)

    def _keep(self, step: wire.Step) -> None:
        """Join what a client does not read: of each request there is no more than its tokens."""
        unread = self._unread
        told = [
            wire.Told(number, [token], text)
            for number, token, text in zip(step.numbers, step.token_ids, step.texts, strict=True)
        ]
        for one in (*told, *step.others):
            known = unread.get(one.number)
            if known is None:
                unread[one.number] = one
            else:
                known.join(one)

    def _obey(self, message: wire.ToEngine) -> None:
        loop = self._server.loop
        if isinstance(message, wire.Add):
            try:
                params = wire.unpacked_params(message.params)
            except ValueError as error:
                self._refuse(message, error)
                return
            if params.structure is None:
                loop.add(self, message, params)
            else:
                self._compiling.add(message.number)
                task = self._asyncio.create_task(self._compile(message, params))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        elif isinstance(message, wire.Abort):
            self._compiling.discard(message.number)
            self._unread.pop(message.number, None)
            loop.drop(self, message.number)
        elif isinstance(message, wire.Turn):
            (self._server.queue if message.wanted else self._server.unqueue)(self)
        else:
            loop.ask(self, message.check)

    async def _compile(self, message: wire.Add, params: SamplingParams) -> None:
        server = self._server
        try:
            await self._asyncio.run_in_executor(server.compilers, server.engine.prepare, params)
        except Exception as error:  # whatever it is: the request must hear of it
            if message.number in self._compiling:
                self._refuse(message, error)
            return
        if message.number in self._compiling:  # neither aborted nor gone
            server.loop.add(self, message, params)
        self._compiling.discard(message.number)

    def _refuse(self, message: wire.Add, error: Exception) -> None:
        self._compiling.discard(message.number)
        self.answer(wire.Step(others=[wire.Told(message.number, refused=str(error))]))

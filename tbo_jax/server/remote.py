"""An engine in another process, for the tasks of an event loop. No request is lost with it.

One connection carries all requests. When it breaks, because the engine's process died, requests
under way wait until there is another one, and are sent anew with the tokens that they have. What a
token is drawn by depends on the seed and its place alone, so the rest is what it would have been.

A request may be what kills the engine. One that was sent and got no token in `SUSPECT_DEATHS` runs
of the engine in a row, until they died, is a *suspect*; it may just have waited. Suspects are tried
one by one, before all others, each when the one before has a token. Clients of an engine take turns
in that, so that none blames its own suspect for the death by another's. One whose trials ended with
the death of the engine `MOST_TRIALS` times in a row is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tbo_jax.sampling.params import MAX_SEED
from tbo_jax.server import wire
from tbo_jax.server.interface import Generate, ModelInfo, Update
from tbo_jax.server.remote_stream import Stream, Updates

logger = logging.getLogger(__name__)

SUSPECT_DEATHS = 2
MOST_TRIALS = 2
FRAME_TOKENS = 2**20  # of prompts, after which a frame ends
AT_ONCE = -(2**40)  # the priority of a trial, before that of all others
RETRY_SECONDS = 0.05  # between attempts to reach an engine that starts


@dataclass(slots=True, eq=False)
class _Running:
    """A sample of a request: what is sent of it, and what it has so far."""

    add: wire.Add
    stream: Stream
    sample: int
    tokens: list[int] = field(default_factory=list)
    is_sent: bool = False  # over the connection that there is
    sent_to: str = ""  # the run of the engine that had it last, and gave it no token yet
    deaths: int = 0  # of the engine, in a row, while that was so
    trials: int = 0  # of those deaths, how many while it was tried


class RemoteClient:
    """An `EngineClient` for an engine that listens at a path; of one event loop.

    It may be made before the engine is there, and outlives it: whoever starts engines says with
    `fail` that no other will come.
    """

    def __init__(self, path: str) -> None:
        """Args:
        path: of the engine's socket.

        Raises:
            ValueError: it is too long for a socket's.
        """
        wire.check_path(path)
        self.path = path
        self.num_connections = 0  # so far; the first is no restart
        self._info: ModelInfo | None = None
        self._run = ""  # of the engine
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._running: dict[int, _Running] = {}  # by number; unfinished
        self._suspects: deque[_Running] = deque()  # that wait for their turn
        self._tried: _Running | None = None  # a suspect that was sent, and has no token yet
        self._wants_turn = self._has_turn = False  # to try one; the engine tells whose it is
        self._next_number = 0
        self._outbox: list[wire.ToEngine] = []
        self._asked: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._statistics: dict[str, Any] = {}  # as last told
        self._changed = asyncio.Event()  # it is ready, or failed
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: str | None = None  # why it takes no more requests

    async def start(self) -> None:
        """Look for the engine from now on, in a task. Does not wait for it."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._stay_connected())

    async def wait_ready(self) -> ModelInfo:
        """Wait until the engine takes requests.

        Raises:
            RuntimeError: none will.
        """
        await self.start()
        while not self.is_ready:
            if self._refusal is not None:
                raise RuntimeError(self._refusal)
            self._changed.clear()
            await self._changed.wait()
        return self.info

    @property
    def info(self) -> ModelInfo:
        """Of the model it runs. RuntimeError if it was not reached yet."""
        if self._info is None:
            raise RuntimeError("the engine is not there yet: expected wait_ready before")
        return self._info

    @property
    def is_ready(self) -> bool:
        """Whether the engine is connected."""
        return self._connection is not None and self._refusal is None

    @property
    def num_unfinished(self) -> int:
        """Samples under way."""
        return len(self._running)

    def generate(self, request: Generate) -> AsyncIterator[Update]:
        """Run a prompt; see `EngineClient`. It is sent now, not when the iteration begins.

        What the iteration raises says why it cannot run.
        """
        stream = Stream(request.tells_tokens)
        try:
            adds = self._adds_of(request)
        except (ValueError, RuntimeError) as error:
            stream.fail(error)
            return Updates(stream, self._leave)
        for sample, add in enumerate(adds):
            running = self._running[add.number] = _Running(add, stream, sample)
            stream.unfinished.add(add.number)
            if self._connection is not None:
                self._send(running)
        self._idle.clear()
        return Updates(stream, self._leave)

    def _adds_of(self, request: Generate) -> list[wire.Add]:
        """Each sample as a request of its own.

        Raises:
            ValueError: a number is larger than the engine takes.
            RuntimeError: it was closed, or the engine is gone for good.
        """
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if abs(request.priority) > wire.MAX_INTEGER:
            raise ValueError(f"priority is {request.priority}: expected at most {wire.MAX_INTEGER}")
        params = request.params
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        first = self._next_number
        self._next_number += params.n
        return [
            wire.Add(
                first + sample,
                request.prompt_token_ids,
                wire.packed_params(
                    replace(
                        params,
                        n=1,
                        seed=(seed + sample) % (MAX_SEED + 1),
                        prompt_logprobs=None if sample else params.prompt_logprobs,
                    )
                ),
                request.cache_salt,
                request.priority,
                request.tells_tokens,
            )
            for sample in range(params.n)
        ]

    async def statistics(self, *, check: bool = False) -> dict[str, Any]:
        """Counts and times of the engine; those told last while it starts anew.

        Args:
            check: tell with "check" what of its books does not add up; None: all does.
        """
        own = {"connections": self.num_connections}
        if self._connection is None:
            return self._statistics | own
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._post(wire.Ask(check))
        return await answer | own

    async def close(self, *, seconds: float = 0.0) -> None:
        """Take no more requests; those that run after so many seconds end with "abort"."""
        if self._refusal is None:
            self._refusal = "the server is shutting down: it takes no more requests"
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for running in list(self._running.values()):
            update = Update(running.sample, finish_reason="abort")
            self._finish(running, update)
        await self._disconnect()

    def fail(self, reason: str) -> None:
        """End all requests with a RuntimeError of this reason, and take no more."""
        self._refusal = reason
        self._changed.set()
        for running in list(self._running.values()):
            self._give_up(running, RuntimeError(reason))
        if self._connecting is not None:
            self._connecting.cancel()

    # The connection.

    async def _disconnect(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._connection is not None:
            self._flush()
            self._connection.transport.close()
            await self._connection.lost.wait()

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        told = ""
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: _Connection(self), self.path
                )
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            await connection.lost.wait()
            if connection.error and connection.error != told:
                told = connection.error
                logger.error("%s: %s", self.path, told)
            if not connection.greeted:
                await asyncio.sleep(RETRY_SECONDS)

    def _connected(self, connection: _Connection, hello: wire.Hello) -> None:
        assert hello.info is not None
        self._info = hello.info
        self._connection = connection
        self.num_connections += 1
        is_another = hello.run != self._run
        self._run = hello.run
        tried, self._tried = self._tried, None
        self._suspects.clear()
        for running in list(self._running.values()):
            running.is_sent = False
            if is_another and running.sent_to:  # it was there when the engine died
                running.deaths += 1
                running.trials += running is tried
            running.sent_to = ""
            if running.trials >= MOST_TRIALS:
                reason = (
                    f"the engine died {running.deaths} times in a row when it was to run this "
                    "request, which is given up"
                )
                self._give_up(running, RuntimeError(reason))
            elif running.deaths >= SUSPECT_DEATHS:
                self._suspects.append(running)
            else:
                self._send(running)
        self._try_next()
        self._changed.set()

    def _disconnected(self) -> None:
        self._connection = None
        self._wants_turn = self._has_turn = False
        self._outbox.clear()
        for answer in self._asked:
            if not answer.done():
                answer.set_result(self._statistics)
        self._asked.clear()

    def _try_next(self) -> None:
        """Send the next suspect, if the one before has a token or is over, and it is our turn."""
        if self._tried is not None or self._connection is None:
            return
        if not self._suspects:
            if self._wants_turn:
                self._wants_turn = self._has_turn = False
                self._post(wire.Turn(False))
        elif self._has_turn:
            self._tried = self._suspects.popleft()
            self._send(self._tried)
        elif not self._wants_turn:
            self._wants_turn = True
            self._post(wire.Turn(True))

    def _send(self, running: _Running) -> None:
        add = running.add
        if running.tokens or running is self._tried:
            priority = min(add.priority, AT_ONCE if running is self._tried else add.priority)
            # Copied: more may come before this is encoded.
            add = wire.Add(
                add.number, add.token_ids, add.params, add.salt, priority, add.tells_tokens,
                running.tokens.copy(),
            )  # fmt: skip
        running.is_sent, running.sent_to = True, self._run
        self._post(add)

    def _post(self, message: wire.ToEngine) -> None:
        """Send a message, with the others of this turn of the event loop."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if self._connection is None:
            return
        start = size = 0
        for stop, message in enumerate(messages, 1):
            size += len(message.token_ids) if isinstance(message, wire.Add) else 0
            if size > FRAME_TOKENS or stop == len(messages):
                self._connection.transport.write(wire.frame(messages[start:stop]))
                start, size = stop, 0

    # What the engine tells.

    def _take(self, messages: list[wire.ToClient]) -> None:
        for message in messages:
            if isinstance(message, wire.Step):
                self._take_step(message)
            elif isinstance(message, wire.YourTurn):
                self._has_turn = self._wants_turn  # not if it was given up meanwhile
                self._try_next()
            elif self._asked:
                self._statistics = message.values
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(message.values)

    def _take_step(self, step: wire.Step) -> None:
        known = self._running
        for number, token, text in zip(step.numbers, step.token_ids, step.texts, strict=True):
            running = known.get(number)
            if running is not None:  # else it was left
                running.tokens.append(token)
                if running.sent_to or running.deaths:
                    self._has_token(running)
                running.stream.put_token(running.sample, token, text)
        for told in step.others:
            running = known.get(told.number)
            if running is not None:
                self._take_told(running, told)

    def _take_told(self, running: _Running, told: wire.Told) -> None:
        if told.refused is not None:
            self._give_up(running, ValueError(told.refused))
            return
        if told.token_ids:
            running.tokens += told.token_ids
            self._has_token(running)
        update = Update(
            running.sample, told.token_ids, told.text, told.logprobs, told.finish_reason,
            told.error, told.num_cached_tokens, told.prompt_logprobs,
        )  # fmt: skip
        if told.finish_reason is None:
            running.stream.put(update)
        else:
            self._finish(running, update)

    def _has_token(self, running: _Running) -> None:
        running.sent_to, running.deaths, running.trials = "", 0, 0
        self._is_cleared(running)

    def _is_cleared(self, running: _Running) -> None:
        if running is self._tried:
            self._tried = None
            self._try_next()

    def _finish(self, running: _Running, update: Update) -> None:
        running.stream.put(update)
        self._forget(running)

    def _give_up(self, running: _Running, error: Exception) -> None:
        stream = running.stream
        self._leave(stream)
        stream.fail(error)

    def _forget(self, running: _Running) -> None:
        number = running.add.number
        if self._running.pop(number, None) is None:
            return
        running.stream.unfinished.discard(number)
        if running in self._suspects:
            self._suspects.remove(running)
            self._try_next()
        self._is_cleared(running)
        if not self._running:
            self._idle.set()

    def _leave(self, stream: Stream) -> None:
        """End what is unfinished of a request; nothing more is told of it."""
        for number in list(stream.unfinished):
            running = self._running[number]
            if running.is_sent and self._connection is not None:
                self._post(wire.Abort(number))
            self._forget(running)


class _Connection(asyncio.Protocol):
    """One connection to an engine, until it is lost."""

    def __init__(self, client: RemoteClient) -> None:
        self.lost = asyncio.Event()
        self.greeted = False
        self.error: str | None = None  # what is wrong with the other side
        self._client = client
        self._frames = wire.Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self.transport.write(wire.frame(wire.Hello(wire.PROTOCOL)))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                if self.greeted:
                    self._client._take(wire.read_to_client(payload))
                    continue
                hello = wire.read_hello(payload)
                self.greeted = True
                self._client._connected(self, hello)
        except wire.WireError as error:
            self.error = str(error)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._client._connection is self:
            self._client._disconnected()
        self.lost.set()

"""An engine in another process, for the tasks of an event loop. No request is lost with it.

One connection carries all requests. When it breaks, because the engine's process died, requests
under way wait until there is another one, and are sent anew with the tokens that they have. What a
token is drawn by depends on the seed and its place alone, so the rest is what it would have been.
Those that may be what kills the engine are sent one by one (`Suspects`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

from tbo_jax.sampling.params import MAX_SEED
from tbo_jax.server import wire
from tbo_jax.server.interface import Generate, ModelInfo, Update
from tbo_jax.server.remote_stream import Stream, Updates
from tbo_jax.server.suspects import Sample, Suspects

logger = logging.getLogger(__name__)

FRAME_TOKENS = 2**20  # of prompts, after which a frame ends
AT_ONCE = -(2**40)  # the priority of a trial, before that of all others
RETRY_SECONDS = 0.05  # between attempts to reach an engine that starts


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
        self._running: dict[int, Sample] = {}  # by number; unfinished
        self._suspects = Suspects(self._send, lambda wanted: self._post(wire.Turn(wanted)))
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
        for number, add in enumerate(adds):
            sample = self._running[add.number] = Sample(add, stream, number)
            stream.unfinished.add(add.number)
            if self._connection is not None:
                self._send(sample)
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
        # The engine looks at ids as well, but what cannot be packed would take along all that is to
        # be sent with it.
        token = max(request.prompt_token_ids, key=abs, default=0)
        if abs(token) > wire.MAX_INTEGER:
            raise ValueError(f"prompt token id {token!r:.80}: expected at most {wire.MAX_INTEGER}")
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
        for sample in list(self._running.values()):
            update = Update(sample.number, finish_reason="abort")
            self._finish(sample, update)
        await self._disconnect()

    def fail(self, reason: str) -> None:
        """End all requests with a RuntimeError of this reason, and take no more."""
        self._refusal = reason
        self._changed.set()
        for sample in list(self._running.values()):
            self._give_up(sample, RuntimeError(reason))
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
        samples = list(self._running.values())
        if hello.run != self._run:
            self._run = hello.run
            self._suspects.engine_died(samples)
        self._suspects.clear()
        suspects = []
        for sample in samples:
            if sample.add.number not in self._running:
                continue  # it was given up with another one of its request
            sample.is_sent, sample.sent_to = False, ""
            if sample.is_guilty:
                reason = (
                    f"the engine died {sample.deaths} times in a row when it was to run this "
                    "request, which is given up"
                )
                self._give_up(sample, RuntimeError(reason))
            elif sample.is_suspect:
                suspects.append(sample)
            else:
                self._send(sample)
        self._suspects.try_all(suspects)
        self._changed.set()

    def _disconnected(self) -> None:
        self._connection = None
        self._suspects.disconnected()
        self._outbox.clear()
        for answer in self._asked:
            if not answer.done():
                answer.set_result(self._statistics)
        self._asked.clear()

    def _send(self, sample: Sample) -> None:
        add = sample.add
        if sample.tokens or sample is self._suspects.tried:
            is_tried = sample is self._suspects.tried
            priority = min(add.priority, AT_ONCE) if is_tried else add.priority
            # Copied: more may come before this is encoded.
            add = wire.Add(
                add.number, add.token_ids, add.params, add.salt, priority, add.tells_tokens,
                sample.tokens.copy(),
            )  # fmt: skip
        sample.is_sent, sample.sent_to = True, self._run
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
                self._suspects.take_turn()
            elif self._asked:
                self._statistics = message.values
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(message.values)

    def _take_step(self, step: wire.Step) -> None:
        known = self._running
        for number, token, text in zip(step.numbers, step.token_ids, step.texts, strict=True):
            sample = known.get(number)
            if sample is not None:  # else it was left
                sample.tokens.append(token)
                if sample.sent_to or sample.deaths:
                    self._suspects.has_token(sample)
                sample.stream.put_token(sample.number, token, text)
        for told in step.others:
            sample = known.get(told.number)
            if sample is not None:
                self._take_told(sample, told)

    def _take_told(self, sample: Sample, told: wire.Told) -> None:
        if told.refused is not None:
            self._give_up(sample, ValueError(told.refused))
            return
        if told.token_ids:
            sample.tokens += told.token_ids
            self._suspects.has_token(sample)
        update = Update(
            sample.number, told.token_ids, told.text, told.logprobs, told.finish_reason,
            told.error, told.num_cached_tokens, told.prompt_logprobs,
        )  # fmt: skip
        if told.finish_reason is None:
            sample.stream.put(update)
        else:
            self._finish(sample, update)

    def _finish(self, sample: Sample, update: Update) -> None:
        sample.stream.put(update)
        self._forget(sample)

    def _give_up(self, sample: Sample, error: Exception) -> None:
        stream = sample.stream
        self._leave(stream)
        stream.fail(error)

    def _forget(self, sample: Sample) -> None:
        number = sample.add.number
        if self._running.pop(number, None) is None:
            return
        sample.stream.unfinished.discard(number)
        self._suspects.forget(sample)
        if not self._running:
            self._idle.set()

    def _leave(self, stream: Stream) -> None:
        """End what is unfinished of a request; nothing more is told of it."""
        for number in list(stream.unfinished):
            sample = self._running[number]
            if sample.is_sent and self._connection is not None:
                self._post(wire.Abort(number))
            self._forget(sample)


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

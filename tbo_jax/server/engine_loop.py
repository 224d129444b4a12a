"""The device's loop: requests of connections in, and what came of each step out, in one batch.

A thread runs it that does nothing else. Text is made here, as in every engine: that takes less than
a microsecond a token, and to send the ids of tokens to be read elsewhere would save none of it,
since stop strings end requests.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from tbo_jax.engine.background import STEP_ATTEMPTS
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.llm import LLM
from tbo_jax.engine.running import TokenEvent
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.server import wire

logger = logging.getLogger(__name__)

HELD_TOKENS = 64  # of a request whose tokens nobody waits for, before they are told all the same


class Receiver(Protocol):
    """Who asked for something, and is told what came of it; in the loop's thread."""

    def tell(self, message: wire.ToClient) -> None:
        """Take a message, without waiting."""


class Group(Protocol):
    """The engines of other hosts, which do the same in the same order."""

    def send(self, orders: list[wire.Add | wire.Abort], step: bool) -> None:
        """Have them obey orders (`Abort` by the engine's ids), then run a step or not."""


@dataclass(frozen=True, slots=True)
class _New:
    receiver: Receiver
    add: wire.Add
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class _Gone:
    receiver: Receiver
    number: int | None  # None: all of them


@dataclass(frozen=True, slots=True)
class _Question:
    receiver: Receiver
    check: bool


@dataclass(slots=True, eq=False)
class _Running:
    number: int
    receiver: Receiver
    request_id: int
    params: SamplingParams
    held: wire.Told | None  # where tokens are not told one by one
    has_begun: bool = False


@dataclass(slots=True)
class _Batch:
    """What steps gave for a receiver, since it was told last."""

    numbers: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    others: list[wire.Told] = field(default_factory=list)


class EngineLoop:
    """Runs the engine while there is work for it, and sleeps otherwise.

    A step that fails is tried anew, as the engine lost no request by it. After `STEP_ATTEMPTS` in a
    row `run` raises what the last one did: another process may fare better.

    Attributes:
        busy_since: when the step that runs has begun, by `time.monotonic`; None between steps.
        num_tokens: how many were told.
    """

    def __init__(
        self,
        llm: LLM,
        group: Group | None = None,
        on_first: Callable[[], None] | None = None,
        stream_interval: float = 0.0,
    ) -> None:
        """Args:
        llm: nobody else uses its engine.
        group: the engines of other hosts.
        on_first: called before the first token is told.
        stream_interval: seconds for which tokens are gathered before they are told. The first
            token of a request and its end are told at once, and all that was gathered with them.
        """
        self.busy_since: float | None = None
        self.num_tokens = 0
        self._llm = llm
        self._engine = llm.engine
        self._group = group
        self._on_first = on_first
        self._commands: SimpleQueue[_New | _Gone | _Question | None] = SimpleQueue()
        self._running: dict[int, _Running] = {}  # by the engine's request id
        self._of: dict[Receiver, dict[int, _Running]] = {}  # by receiver, then by number
        self._orders: list[wire.Add | wire.Abort] = []  # for the group, since the last step
        self._failures = 0  # steps in a row
        self._interval = stream_interval
        self._told_at = 0.0  # by `time.monotonic`
        self._batches: dict[Receiver, _Batch] = {}  # that are gathered

    # These may be called in any thread.

    def add(self, receiver: Receiver, add: wire.Add, params: SamplingParams) -> None:
        """Run a request, whose params are unpacked. `Told.refused` says why it cannot run."""
        self._commands.put(_New(receiver, add, params))

    def drop(self, receiver: Receiver, number: int | None = None) -> None:
        """End a request of a receiver, or all; nothing more is told of them."""
        self._commands.put(_Gone(receiver, number))

    def ask(self, receiver: Receiver, check: bool) -> None:
        """Tell the statistics between two steps."""
        self._commands.put(_Question(receiver, check))

    def stop(self) -> None:
        """Have `run` return after the step under way."""
        self._commands.put(None)

    # What follows runs in the loop's thread.

    def run(self) -> None:
        """Do it until it is stopped.

        Raises:
            Exception: what a step raised, the last of `STEP_ATTEMPTS`. In a group it is the first:
                the others may have done it.
        """
        while self._obey():
            if self._group is not None and (self._orders or self._running):
                self._group.send(self._orders, bool(self._running))
            self._orders.clear()
            if self._running:
                self._step()

    def _obey(self) -> bool:
        """Do what was asked for meanwhile; wait for it if there is nothing to compute."""
        if not self._running and not self._do(self._commands.get()):
            return False
        with contextlib.suppress(Empty):
            while self._do(self._commands.get_nowait()):
                pass
            return False
        return True

    def _do(self, command: _New | _Gone | _Question | None) -> bool:
        if command is None:
            return False
        if isinstance(command, _New):
            self._add(command)
        elif isinstance(command, _Gone):
            of = self._of.get(command.receiver, {})
            numbers = list(of) if command.number is None else [command.number]
            for one in [of[number] for number in numbers if number in of]:
                self._orders.append(wire.Abort(one.request_id))
                drop(self._engine, one.request_id)
                self._forget(one)
        else:
            command.receiver.tell(wire.Statistics(self._statistics(command.check)))
        return True

    def _add(self, new: _New) -> None:
        add = new.add
        try:
            if add.number in self._of.get(new.receiver, {}):
                raise ValueError(f"request {add.number} exists already and is unfinished")
            self._orders.append(add)
            request_id = add_to(self._engine, add, new.params)
        except ValueError as error:
            told = wire.Told(add.number, refused=str(error))
            new.receiver.tell(wire.Step(others=[told]))
            return
        held = None if add.tells_tokens else wire.Told(add.number)
        one = _Running(add.number, new.receiver, request_id, new.params, held)
        self._running[request_id] = one
        self._of.setdefault(new.receiver, {})[add.number] = one

    def _forget(self, one: _Running) -> None:
        del self._running[one.request_id]
        of = self._of[one.receiver]
        del of[one.number]
        if not of:
            del self._of[one.receiver]

    def _step(self) -> None:
        self.busy_since = time.monotonic()
        try:
            with self._llm.calls.enter():
                events = self._engine.step()
        except Exception as error:
            self._failures += 1
            logger.warning("step failed, number %d in a row", self._failures, exc_info=error)
            if self._group is not None or self._failures == STEP_ATTEMPTS:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold arrays on the device
        else:
            self._failures = 0
            self._tell(events)
        finally:
            self.busy_since = None

    def _tell(self, events: list[TokenEvent]) -> None:
        is_urgent = False
        for event in events:
            assert event.request_id is not None
            one = self._running[event.request_id]
            batch = self._batches.get(one.receiver)
            if batch is None:
                batch = self._batches[one.receiver] = _Batch()
            if event.finish_reason is None and event.logprobs is None and one.held is None:
                if event.token_id is not None:
                    batch.numbers.append(one.number)
                    batch.token_ids.append(event.token_id)
                    batch.texts.append(event.text)
                    if not one.has_begun:
                        one.has_begun = is_urgent = True
                continue
            told = self._told(one, event)
            if one.held is not None:
                one.held.join(told)
                if told.finish_reason is None and len(one.held.token_ids) < HELD_TOKENS:
                    continue
                told, one.held = one.held, wire.Told(one.number)
            batch.others.append(told)
            is_urgent |= told.finish_reason is not None or not one.has_begun
            one.has_begun = True
        had_none, self.num_tokens = self.num_tokens == 0, self.num_tokens + len(events)
        if had_none and events and self._on_first is not None:
            self._on_first()
        # To tell costs a step as much as some rows: threads and processes wake up, which take the
        # cores from the model where that runs on them. The loop has no need of a clock: what is
        # gathered belongs to requests that run, so that another step follows.
        now = time.monotonic()
        if is_urgent or now - self._told_at >= self._interval:
            self._told_at = now
            batches, self._batches = self._batches, {}
            for receiver, batch in batches.items():
                if batch.numbers or batch.others:
                    receiver.tell(
                        wire.Step(batch.numbers, batch.token_ids, batch.texts, batch.others)
                    )

    def _told(self, one: _Running, event: TokenEvent) -> wire.Told:
        told = wire.Told(one.number, text=event.text, finish_reason=event.finish_reason)
        token = event.token_id
        if event.finish_reason is not None:
            request, _ = self._engine.pop(one.request_id)
            self._forget(one)
            told.error = request.error
            told.num_cached_tokens = request.num_cached
            if request.prompt_logprobs is not None:
                told.prompt_logprobs = request.prompt_logprobs.read()
            # As a completion has it: without the token that ended it.
            if token is not None and self._engine.leaves_out(one.params, token):
                token = None
        if token is not None:
            told.token_ids.append(token)
            if event.logprobs is not None:
                told.logprobs = [event.logprobs]
        return told

    def _statistics(self, check: bool) -> dict[str, Any]:
        values: dict[str, Any] = self._llm.statistics | self._engine.scheduler.load
        if check:
            try:
                self._engine.check()
                values["check"] = None
            except RuntimeError as error:
                values["check"] = str(error)
        return values


def add_to(engine: Engine, add: wire.Add, params: SamplingParams) -> int:
    """Add a request of a client; the engine's id. Raises ValueError as `Engine.add`."""
    return engine.add(
        add.token_ids, params, salt=add.salt, priority=add.priority, generated=add.generated
    )


def drop(engine: Engine, request_id: int) -> None:
    """Take a request out of the engine, finished or not, and leave nothing of it there."""
    engine.abort(request_id)
    engine.pop(request_id)

"""A thread that runs an engine for the tasks of event loops.

It alone adds requests, aborts them and calls `Engine.step`, so that no event loop ever waits for
the engine's lock. What it is asked for comes through a queue, whose `put` never waits and may be
called by destructors. What it tells goes to the event loops in one batch for each of them and step.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from tbo_jax.engine.channel import Channel, send
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.generation import Asked, Completion, Generation
from tbo_jax.engine.running import TokenEvent
from tbo_jax.engine.sharing import Calls

logger = logging.getLogger(__name__)

STEP_ATTEMPTS = 3  # of steps that fail in a row; then the requests under way are given up
EXIT_SECONDS = 10.0  # that an interpreter which exits waits for the step that runs

# Of one prompt, in this order: None when it was added, its tokens, and what ends it. An exception
# may come in place of any.
Item = TokenEvent | Completion | Exception | None


@dataclass(slots=True, eq=False)
class Ticket:
    """A prompt to run, and where it is told what comes of it."""

    request_id: str
    asked: Asked
    channel: Channel[Item]
    tells_tokens: bool  # else only what ends it
    generation: Generation | None = field(init=False, default=None)  # once it was added
    is_over: bool = field(init=False, default=False)


@dataclass(frozen=True, slots=True)
class _Add:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Abort:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Stop:
    drain: bool


_Commands = SimpleQueue[_Add | _Abort | _Stop]
_Told = defaultdict[asyncio.AbstractEventLoop, list[tuple[Channel[Item], Item]]]


class EngineThread:
    """Runs the engine while there is work for it, and sleeps otherwise.

    A step that fails is tried anew, as the engine lost no request by it. After `STEP_ATTEMPTS` in a
    row each prompt under way ends with a RuntimeError, whose cause is that of the last step. New
    ones are taken all the same: it may have been one of those. `step_error` tells how it stands.
    """

    def __init__(self, engine: Engine, calls: Calls) -> None:
        """Start it.

        Args:
            engine: may have other owners of requests.
            calls: times when there is work.
        """
        self._engine = engine
        self._calls = calls
        self.step_error: Exception | None = None  # of the last step; None if it went well
        self._commands: _Commands = SimpleQueue()
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}  # those that are not over
        self._refusal: RuntimeError | None = None  # why no more are taken
        # The thread's own:
        self._owner = object()
        self._running: dict[int, Ticket] = {}  # by the engine's request id
        self._told: _Told = defaultdict(list)  # since the last batches
        self._stopping = False
        self._failures = 0  # steps in a row
        self._thread = threading.Thread(target=self._run, name="tbo_jax engine", daemon=True)
        self._thread.start()
        # Not a method: an engine that nobody needs any more is not kept until the exit.
        self._at_exit = partial(_stop_at_exit, self._commands, self._thread)
        atexit.register(self._at_exit)

    @property
    def num_unfinished(self) -> int:
        """The prompts under way."""
        return len(self._tickets)

    def check_open(self) -> None:
        """RuntimeError, with the reason, if no prompt is taken any more."""
        if self._refusal is not None:
            raise _copy(self._refusal)

    def submit(self, ticket: Ticket) -> None:
        """Run a prompt. Its channel gets None when it was added to the engine, or an exception.

        Raises:
            ValueError: there is an unfinished one of this id.
            RuntimeError: no prompt is taken any more.
        """
        with self._lock:
            self.check_open()
            if ticket.request_id in self._tickets:
                raise ValueError(
                    f"request_id is {ticket.request_id!r:.80}: expected one that no unfinished "
                    "request has"
                )
            self._tickets[ticket.request_id] = ticket
            self._commands.put(_Add(ticket))

    def abort(self, ticket: Ticket) -> None:
        """End a prompt with what it has so far; nothing happens if it is over."""
        if not ticket.is_over:
            self._commands.put(_Abort(ticket))

    def abort_by_id(self, request_id: str) -> bool:
        """End a prompt with what it has so far. Returns whether there is such an unfinished one.

        Raises:
            RuntimeError: there is not, and no prompt is taken any more.
        """
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None:
                self.check_open()
                return False
        self.abort(ticket)
        return True

    def stop(self, drain: bool) -> None:
        """Take no more prompts; end when those under way are over.

        With `drain` they are finished, otherwise aborted, also if it was told to drain before.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = _shut_down()
        self._commands.put(_Stop(drain))

    def leave(self) -> None:
        """Stop without a drain, from a destructor: nobody is there to call or to be told."""
        self._commands.put(_Stop(False))

    def join(self) -> None:
        """Wait for the end of a thread that was told to stop."""
        self._thread.join()
        atexit.unregister(self._at_exit)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._run_until_stopped()
            refusal = _shut_down()
        except BaseException as error:
            logger.exception("the engine's thread has ended")
            refusal = _because(f"the engine's thread has ended: {error!r:.200}", error)
            for ticket in self._tickets_running():
                assert ticket.generation is not None
                with contextlib.suppress(Exception):  # the engine's books may be wrong
                    ticket.generation.drop()
            self._running.clear()
        with self._lock:
            self._refusal = self._refusal or refusal
            left = list(self._tickets.values())
        for ticket in left:  # of an error, or asked for as the last one ended
            self._end(ticket, _copy(refusal))
        self._tell()

    def _run_until_stopped(self) -> None:
        while not self._stopping:
            self._obey(self._commands.get())
            self._obey_waiting()
            if self._running:
                with self._calls.enter():
                    while self._running:
                        self._step()
                        self._obey_waiting()

    def _obey_waiting(self) -> None:
        """Do what was asked for meanwhile, and tell what there is to tell."""
        with contextlib.suppress(Empty):
            while True:
                self._obey(self._commands.get_nowait())
        self._tell()

    def _obey(self, command: _Add | _Abort | _Stop) -> None:
        if isinstance(command, _Add):
            self._add(command.ticket)
        elif isinstance(command, _Abort):
            self._abort(command.ticket)
        else:
            self._stopping = True
            if not command.drain:
                for ticket in self._tickets_running():
                    self._abort(ticket)

    def _tickets_running(self) -> list[Ticket]:
        return list(dict.fromkeys(self._running.values()))

    def _add(self, ticket: Ticket) -> None:
        try:
            if self._stopping:
                raise _shut_down()
            ticket.generation = Generation(
                self._engine, ticket.asked, self._owner, ticket.tells_tokens
            )
        except Exception as error:
            self._end(ticket, error)
        else:
            self._running |= dict.fromkeys(ticket.generation.request_ids, ticket)
            self._told[ticket.channel.loop].append((ticket.channel, None))

    def _abort(self, ticket: Ticket) -> None:
        if ticket.generation is not None:
            for request_id in ticket.generation.request_ids:
                self._engine.abort(request_id)  # the next step returns its last event

    def _step(self) -> None:
        try:
            events = self._engine.step(self._owner)
        except Exception as error:
            self._fail(error)
            return
        self._failures, self.step_error = 0, None
        for event in events:
            self._take(event)
        if not events:
            for ticket in self._tickets_running():
                assert ticket.generation is not None
                try:
                    ticket.generation.check_held()
                except RuntimeError as error:
                    self._give_up(ticket, error)
        self._tell()

    def _take(self, event: TokenEvent) -> None:
        request_id = event.request_id
        assert request_id is not None
        ticket = self._running.get(request_id)
        if ticket is None:  # given up
            return
        assert ticket.generation is not None
        try:
            event = ticket.generation.take(event)
        except ValueError as error:
            self._give_up(ticket, _because(str(error), error))
            return
        if ticket.tells_tokens:
            self._told[ticket.channel.loop].append((ticket.channel, event))
        if event.finish_reason is not None:
            del self._running[request_id]
            if ticket.generation.is_over:
                self._end(ticket, ticket.generation.completion)

    def _fail(self, error: Exception) -> None:
        """A step failed; after some, all that is under way does."""
        self._failures += 1
        logger.warning("step failed, number %d in a row", self._failures, exc_info=error)
        traceback.clear_frames(error.__traceback__)  # they hold arrays on the device
        self.step_error = error
        if self._failures < STEP_ATTEMPTS:
            return
        self._failures = 0
        for ticket in self._tickets_running():
            message = f"{STEP_ATTEMPTS} steps failed in a row, the last one with {error!r:.200}"
            self._give_up(ticket, _because(message, error))
        self._tell()

    def _give_up(self, ticket: Ticket, error: Exception) -> None:
        assert ticket.generation is not None
        for request_id in ticket.generation.request_ids:
            del self._running[request_id]
        ticket.generation.drop()
        self._end(ticket, error)

    def _end(self, ticket: Ticket, item: Completion | Exception) -> None:
        ticket.is_over = True
        with self._lock:
            del self._tickets[ticket.request_id]
        self._told[ticket.channel.loop].append((ticket.channel, item))

    def _tell(self) -> None:
        if not self._told:
            return
        told, self._told = self._told, defaultdict(list)
        for loop, batch in told.items():
            try:
                send(loop, batch)
            except RuntimeError:  # it is closed, with those who waited
                for ticket in self._tickets_running():
                    if ticket.channel.loop is loop:
                        self._abort(ticket)


def _stop_at_exit(commands: _Commands, thread: threading.Thread) -> None:
    """Have the thread end before the interpreter: in the midst of a step XLA might crash."""
    commands.put(_Stop(False))
    thread.join(EXIT_SECONDS)


def _shut_down() -> RuntimeError:
    return RuntimeError("the AsyncLLM was shut down: it takes no more calls")


def _because(message: str, cause: BaseException) -> RuntimeError:
    error = RuntimeError(message)
    error.__cause__ = cause
    return error


def _copy(error: RuntimeError) -> RuntimeError:
    """The same error for one more caller: one that is raised gets that caller's traceback."""
    copy = RuntimeError(*error.args)
    copy.__cause__ = error.__cause__
    return copy

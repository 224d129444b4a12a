"""Requests that may be what kills the engine, and how they are found out.

One that was sent and got no token in `SUSPECT_DEATHS` runs of the engine in a row, until they died,
is a *suspect*; it may just have waited. Suspects are tried one by one, before all others, each when
the one before has a token. Clients of an engine take turns in that, so that none blames its own
suspect for the death by another's. One whose trials ended with the death of the engine
`MOST_TRIALS` times in a row is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tbo_jax.server import wire
from tbo_jax.server.remote_stream import Stream

SUSPECT_DEATHS = 2
MOST_TRIALS = 2


@dataclass(slots=True, eq=False)
class Sample:
    """A sample of a request: what is sent of it, and what it has so far."""

    add: wire.Add
    stream: Stream
    number: int  # among the samples of the request
    tokens: list[int] = field(default_factory=list)
    is_sent: bool = False  # over the connection that there is
    sent_to: str = ""  # the run of the engine that had it last, and gave it no token yet
    deaths: int = 0  # of the engine, in a row, while that was so
    trials: int = 0  # of those deaths, how many while it was tried

    @property
    def is_suspect(self) -> bool:
        """Whether it has to wait for its trial."""
        return self.deaths >= SUSPECT_DEATHS

    @property
    def is_guilty(self) -> bool:
        """Whether it is to be sent no more."""
        return self.trials >= MOST_TRIALS


class Suspects:
    """Those of a client, in the order of their trials."""

    def __init__(
        self, send: Callable[[Sample], None], ask_for_turn: Callable[[bool], None]
    ) -> None:
        """Args:
        send: sends one to the engine.
        ask_for_turn: asks the engine for this client's turn, or gives it up or back.
        """
        self.tried: Sample | None = None  # that was sent, and has no token yet
        self._send = send
        self._ask_for_turn = ask_for_turn
        self._waiting: deque[Sample] = deque()
        self._wants_turn = self._has_turn = False  # the engine tells whose it is

    def __len__(self) -> int:
        """How many wait for their trial."""
        return len(self._waiting)

    def engine_died(self, samples: list[Sample]) -> None:
        """Count a death of the engine for those that it had and gave no token to."""
        for sample in samples:
            if sample.sent_to:
                sample.deaths += 1
                sample.trials += sample is self.tried

    def clear(self) -> None:
        """Know of none any more."""
        self.tried = None
        self._waiting.clear()

    def try_all(self, samples: list[Sample]) -> None:
        """Try these one by one."""
        self._waiting.extend(samples)
        self._try_next()

    def disconnected(self) -> None:
        """Have no turn any more."""
        self._wants_turn = self._has_turn = False

    def take_turn(self) -> None:
        """Have the turn, if it was not given up meanwhile."""
        self._has_turn = self._wants_turn
        self._try_next()

    def has_token(self, sample: Sample) -> None:
        """Clear a sample of all suspicion."""
        sample.sent_to, sample.deaths, sample.trials = "", 0, 0
        self._end_trial(sample)

    def forget(self, sample: Sample) -> None:
        """Drop a sample that is over."""
        if sample in self._waiting:
            self._waiting.remove(sample)
            self._try_next()
        self._end_trial(sample)

    def _end_trial(self, sample: Sample) -> None:
        if sample is self.tried:
            self.tried = None
            self._try_next()

    def _try_next(self) -> None:
        """Send the next one, if the one before has a token or is over, and it is our turn."""
        if self.tried is not None:
            return
        if not self._waiting:
            if self._wants_turn:
                self._wants_turn = self._has_turn = False
                self._ask_for_turn(False)
        elif self._has_turn:
            self.tried = self._waiting.popleft()
            self._send(self.tried)
        elif not self._wants_turn:
            self._wants_turn = True
            self._ask_for_turn(True)

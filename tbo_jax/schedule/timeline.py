"""The modelled timeline: one in-order compute lane, one in-order link lane.

The order is the compiler's, the prices are a roofline's. An asynchronous collective takes the link
from its start, or from when the link is free, and its done waits for it. Whatever the compute lane
waits is exposed communication, the rest of the link's time is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tbo_jax.schedule.cost import Work
from tbo_jax.schedule.hlo import Computation, Instruction, Module
from tbo_jax.schedule.program import Program, Running, Start, Step
from tbo_jax.schedule.targets import Rates

Lane = Literal["compute", "link"]


@dataclass(frozen=True)
class Event:
    """A stretch of a lane, in seconds from the step's start."""

    lane: Lane
    name: str  # of the instruction
    op_name: str
    source: str
    start: float
    end: float
    kind: str = ""  # of a collective: all-to-all, ...

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Transfer:
    """One run of a collective."""

    event: Event
    bytes: float  # that a device sends
    waited: float  # seconds that compute stood still for it: exposed
    computed: float  # seconds of compute between its start and its done, as scheduled
    beside: tuple[tuple[str, float], ...]  # what computed there: name, seconds; longest first
    synchronous: bool
    queued: float  # seconds that it waited for the link

    @property
    def hidden(self) -> float:
        return self.event.seconds - self.waited


@dataclass
class Timeline:
    """What ran when. All seconds are modelled."""

    events: list[Event] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    step: float = 0.0
    assumed_loops: dict[str, float] = field(default_factory=dict)  # name: turns assumed
    flops: float = 0.0
    bytes: float = 0.0
    contention: float = 0.0  # of compute: what it takes longer because collectives run beside it
    not_priced: dict[str, str] = field(default_factory=dict)  # instruction: what of it is not

    @property
    def compute(self) -> float:
        return math.fsum(e.seconds for e in self.events if e.lane == "compute")

    @property
    def communication(self) -> float:
        return math.fsum(t.event.seconds for t in self.transfers)

    @property
    def exposed(self) -> float:
        return math.fsum(t.waited for t in self.transfers)

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed


def simulate(
    module: Module,
    rates: Rates,
    trip_counts: Mapping[str, float],
    kernels: Mapping[str, Work] | None = None,
    ragged_rows: float | None = None,
    device_ids: Sequence[int] | None = None,
) -> Timeline:
    """Run a scheduled module through the two lanes.

    Args:
        module: scheduled HLO.
        rates: prices.
        trip_counts: turns of loops whose count is known only at run time, by a part of the loop's
            `op_name` (`jax.named_scope` puts one there). A loop without an entry is counted once
            and listed in `assumed_loops`. A loop that holds collectives turns a whole number of
            times.
        kernels: work of custom calls, which nobody can look into, by a part of their `op_name`.
        ragged_rows: rows that a device sends to others in a ragged exchange; default all it could.
        device_ids: the devices, in the order in which the program numbers them; default that of the
            machine.

    Raises:
        ValueError: the module is not scheduled, so its order means nothing; turns below zero; a
            collective that ends and was not started.
    """
    if not module.is_scheduled:
        raise ValueError(f"module {module.name} is not scheduled: its text has no order")
    program = Program(module, rates, trip_counts, kernels or {}, ragged_rows, device_ids)
    timeline = _Simulation(program).run()
    _check(timeline)
    return timeline


def _check(timeline: Timeline) -> None:
    slack = 1e-9 + 1e-6 * timeline.step
    assert abs(timeline.hidden + timeline.exposed - timeline.communication) <= slack
    assert timeline.step >= max(timeline.compute, timeline.communication) - slack
    assert abs(timeline.step - timeline.compute - timeline.exposed) <= slack


@dataclass
class _Flight:
    """A collective that was given to the link and has not been waited for."""

    instruction: Instruction
    op_name: str
    kind: str
    bytes: float
    synchronous: bool
    issued: float
    start: float
    end: float
    first_event: int  # index in the timeline of the first event after it was issued
    waited: float = 0.0


class _Simulation:
    def __init__(self, program: Program):
        self.program = program
        self.timeline = Timeline(assumed_loops=program.assumed_loops, not_priced=program.not_priced)
        self.now = 0.0  # end of the compute lane
        self.link_free = 0.0
        self.flights: dict[Start, _Flight] = {}

    def run(self) -> Timeline:
        self._run(self.program.module.entry)
        for key in list(self.flights):  # a program is over when its transfers are
            self._wait(key)
        self.timeline.step = self.now
        self.timeline.events.sort(key=lambda event: event.start)
        self.timeline.transfers.sort(key=lambda transfer: transfer.event.start)
        return self.timeline

    def _run(self, computation: Computation, carried: Running = ()) -> Running:
        """Run a computation in the order of its schedule.

        It is given running collectives, and gives back those that it leaves running.
        """
        steps, left = self.program.steps(computation.name, carried)
        for step in steps:
            if step.role == "compute":
                self._compute(step)
            elif step.role == "wait":
                self._wait(step.start)
            elif step.role == "loop":
                self._loop(computation, step)
            else:
                self._issue(computation, step)
                if step.role == "synchronous":
                    self._wait(step.start)
        return left

    def _loop(self, computation: Computation, step: Step) -> None:
        instruction = computation.by_name[step.name]
        carried = step.carried
        for _ in range(round(self.program.turns(computation, instruction))):
            for called in self.program.taken(instruction):
                carried = self._run(called, carried)

    def _compute(self, step: Step) -> None:
        seconds, work = self.program.price(*step.start)
        self.timeline.flops += work.flops
        self.timeline.bytes += work.bytes
        if seconds:
            instruction = self.program.instruction(step.start)
            end = self._finished(seconds, work)
            self.timeline.contention += max(0.0, end - self.now - seconds)
            self._event("compute", instruction, instruction.op_name, self.now, end)
            self.now = end

    def _finished(self, seconds: float, work: Work) -> float:
        """When work that starts now and takes so long alone is done beside what is on the link.

        Starting its kernels takes as long as ever. A loop of kernels is slowed as one kernel with
        all of their work.
        """
        rates = self.program.rates
        left = max(0.0, seconds - work.kernels * rates.launch_seconds)
        now = self.now + seconds - left
        for flight in self.flights.values():  # in the order in which the link serves them
            alone = min(left, max(0.0, flight.start - now))
            now, left = now + alone, left - alone
            if left and now < flight.end:
                slowed = work.slowed(rates, flight.bytes / (flight.end - flight.start))
                beside = min(left, (flight.end - now) / slowed)
                now, left = now + beside * slowed, left - beside
        return now + left

    def _issue(self, computation: Computation, step: Step) -> None:
        """Give a collective to the link, which serves one after the other."""
        instruction = computation.by_name[step.name]
        self._wait(step.start)  # of the turn before, if nothing did
        kind, sent, seconds = self.program.transfer(*step.start)
        start = max(self.now, self.link_free)
        self.link_free = start + seconds
        self.flights[step.start] = _Flight(
            instruction, self.program.op_name(computation, instruction), kind, sent,
            synchronous=step.role == "synchronous",
            issued=self.now, start=start, end=self.link_free,
            first_event=len(self.timeline.events),
        )  # fmt: skip

    def _wait(self, key: Start) -> None:
        """Compute stands still until a collective is over.

        From its issue to its end the link is busy, with those before it and then with itself, and
        none of them was waited for until now. So each takes the part of the wait in which the link
        served it.
        """
        if key not in self.flights:
            return  # started elsewhere
        flight = self.flights[key]
        for other in self.flights.values():
            other.waited += max(0.0, min(other.end, flight.end) - max(other.start, self.now))
        self.now = max(self.now, flight.end)
        del self.flights[key]
        beside: dict[str, float] = {}
        for event in self.timeline.events[flight.first_event :]:
            if event.lane == "compute":
                beside[event.name] = beside.get(event.name, 0.0) + event.seconds
        self.timeline.transfers.append(
            Transfer(
                event=self._event(
                    "link",
                    flight.instruction,
                    flight.op_name,
                    flight.start,
                    flight.end,
                    flight.kind,
                ),
                bytes=flight.bytes,
                waited=flight.waited,
                computed=math.fsum(beside.values()),
                beside=tuple(sorted(beside.items(), key=lambda item: -item[1])),
                synchronous=flight.synchronous,
                queued=flight.start - flight.issued,
            )
        )

    def _event(
        self,
        lane: Lane,
        instruction: Instruction,
        op_name: str,
        start: float,
        end: float,
        kind: str = "",
    ) -> Event:
        event = Event(lane, instruction.name, op_name, instruction.source, start, end, kind)
        self.timeline.events.append(event)
        return event

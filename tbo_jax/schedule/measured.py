"""What a profile says of a step: its time, and what of its communication was hidden.

On a device and in an execution, a transfer is exposed while it runs and no compute kernel does, and
hidden the rest of its time. The step is the time from the first event to the end of the last one.
Where neither runs the device is idle: it waits for the host. Of all executions of a device the
median counts, and of the devices the median one.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tbo_jax.schedule.hlo import Module, parse
from tbo_jax.schedule.known import Known, known_instructions
from tbo_jax.schedule.profile import ASYNC_OPS, OPS, DeviceEvent, Profile, listed
from tbo_jax.schedule.timeline import Event, Timeline, Transfer
from tbo_jax.schedule.traffic import COLLECTIVES

Interval = tuple[float, float]
_ENOUGH = 0.5  # of the names in a profile: fewer that a step has, and it is of another program


@dataclass(frozen=True)
class MeasuredCollective:
    """The collectives of a kind in a stage, in one step. Seconds of the median device."""

    name: str  # of the first instruction
    kind: str
    scope: str  # layer_2/micro_batch_1/dispatch
    seconds: float
    hidden: float
    exposed: float


@dataclass(frozen=True)
class MeasuredStage:
    """A stage in one step. Seconds of the median device."""

    scope: str  # "" for all that is outside of layers
    compute: float
    communication: float
    hidden: float
    exposed: float


@dataclass(frozen=True)
class MeasuredDevice:
    """A device. Seconds of its median execution."""

    name: str
    executions: int
    step: float
    compute: float  # some kernel runs
    communication: float  # some transfer runs
    exposed: float
    idle: float  # neither

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed


@dataclass(frozen=True)
class MeasuredReport:
    """What a profile says of a step. Seconds of the median device."""

    micro_batches: int
    module: str
    step: float
    compute: float
    communication: float
    hidden: float
    exposed: float
    idle: float
    matched: float  # share of the busy time of which the instruction is known
    devices: tuple[MeasuredDevice, ...]
    collectives: tuple[MeasuredCollective, ...]
    stages: tuple[MeasuredStage, ...]
    timeline: Timeline  # of the execution whose step is nearest to the median

    @property
    def hidden_share(self) -> float:
        """Of communication; 1 if there is none."""
        return self.hidden / self.communication if self.communication else 1.0

    @property
    def executions(self) -> int:
        """How often each device ran the whole step in the profile; the fewest of them."""
        return min(device.executions for device in self.devices)

    def spread(self, quantity: str) -> tuple[float, float]:
        """The least and the largest of the devices' step, compute, ... in seconds."""
        values = [getattr(device, quantity) for device in self.devices]
        return min(values), max(values)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the timeline."""
        fields = {k: v for k, v in vars(self).items() if k != "timeline"}
        fields["devices"] = [asdict(d) | {"hidden": d.hidden} for d in self.devices]
        fields["collectives"] = [asdict(c) for c in self.collectives]
        fields["stages"] = [asdict(s) for s in self.stages]
        return fields | {"hidden_share": self.hidden_share, "times": "measured"}


def text_path(folder: Path, micro_batches: int) -> Path:
    """Where the text of a step is kept beside its profile, in the folder that holds both."""
    return folder / f"step_x{micro_batches}.hlo"


def measure_steps(
    folder: Path, profile: Profile, compiled: Mapping[int, str]
) -> dict[int, MeasuredReport]:
    """What the profile in `folder` says of a step, by number of micro-batches.

    A profile is of the program that ran, and names of instructions differ between versions of XLA
    and between a machine that was there and one that was not. So a text that was kept beside the
    profile counts, and not the one that was compiled now.

    Args:
        folder: that was given to `jax.profiler.trace`.
        profile: of it.
        compiled: texts of the step, by number of micro-batches.

    Raises:
        ValueError: a kept text is no HLO, or as `measure`.
    """
    modules: dict[int, Module] = {}
    for count, text in compiled.items():
        kept = text_path(folder, count)
        modules[count] = parse(kept.read_text(encoding="utf-8") if kept.is_file() else text)
    return measure(profile, modules)


def measure(profile: Profile, modules: Mapping[int, Module]) -> dict[int, MeasuredReport]:
    """What a profile says of a step in its forms.

    Instructions are found by name. A profile may have several programs, all called `jit_step`: each
    counts for the form of the step whose names are the most like its own.

    Args:
        profile: of `read_profile`.
        modules: the compiled step, by number of micro-batches.

    Returns:
        By number of micro-batches; those that the profile has.

    Raises:
        ValueError: the profile has no program of the step, or no execution of it from start to end.
    """
    known = {count: known_instructions(module) for count, module in modules.items()}
    found: dict[int, tuple[float, str, list[DeviceEvent]]] = {}
    for (name, _), events in _programs(profile.events).items():
        names = {event.hlo_op for event in events if event.hlo_op}
        count = max(known, key=lambda count: _likeness(names, known[count]))
        likeness = _likeness(names, known[count])
        if len(names & known[count].keys()) < _ENOUGH * len(names) or not names:
            continue
        if likeness > found.get(count, (0.0,))[0]:
            found[count] = likeness, name, events
    if not found:
        raise ValueError(_strangers(profile, modules, known))
    unnamed = [event for event in profile.events if not event.module]
    return {
        count: _report(count, name, events, unnamed if name else (), modules[count], known[count])
        for count, (_, name, events) in sorted(found.items())
    }


def _programs(events: Iterable[DeviceEvent]) -> dict[tuple[str, str], list[DeviceEvent]]:
    """Events by module and program; all of them together where none tells its module."""
    found: dict[tuple[str, str], list[DeviceEvent]] = {}
    for event in events:
        found.setdefault((event.module, event.program), []).append(event)
    return {key: of for key, of in found.items() if key[0]} or found


def _likeness(names: set[str], known: Mapping[str, Known]) -> float:
    """Names in both, as a part of those in either. Nothing runs for a done, or around a loop."""
    runs = {name for name, what in known.items() if what.role in ("compute", "transfer")}
    return len(names & known.keys()) / len(names | runs)


def _strangers(
    profile: Profile, modules: Mapping[int, Module], known: Mapping[int, Mapping[str, Known]]
) -> str:
    """The message that no program of a profile is the step."""
    programs = []
    for (name, program), events in _programs(profile.events).items():
        names = [event.hlo_op for event in events if event.hlo_op]
        number = f" ({program})" if program else ""
        programs.append(f"{name or 'a program without a name'}{number} with {listed(names, 3)}")
    expected = []
    for count, module in modules.items():
        names = [name for name, what in known[count].items() if what.role == "compute"]
        expected.append(f"{module.name} (micro-batches: {count}) with {listed(names, 3)}")
    return (
        f"{profile.folder}: no program of this profile has most of its instructions in the step. "
        f"Found {listed(programs, 4)}; expected {'; or '.join(expected)}. Names differ between "
        "versions of jax and between machines: keep the step's text beside its profile, as "
        "examples/measure_overlap.py does"
    )


@dataclass
class _Execution:
    """One run of the step on one device. Intervals are disjoint and in order."""

    start: float
    end: float
    kernels: list[tuple[DeviceEvent, Known]]
    transfers: list[tuple[Interval, Known]]
    compute: list[Interval]
    communication: list[Interval]
    exposed: list[Interval]

    @property
    def step(self) -> float:
        return self.end - self.start

    @property
    def idle(self) -> float:
        return self.step - _length(self.compute) - _length(self.exposed)


def _report(
    count: int,
    name: str,
    events: Sequence[DeviceEvent],
    unnamed: Sequence[DeviceEvent],
    module: Module,
    known: Mapping[str, Known],
) -> MeasuredReport:
    by_device: dict[str, list[_Execution]] = {}
    for device in sorted({event.device for event in events}, key=lambda name: (len(name), name)):
        mine = [event for event in events if event.device == device]
        others = [event for event in unnamed if event.device == device]
        runs = [_execution(run, known) for run in executions(mine, others, module, known)]
        if runs:
            by_device[device] = runs
    if not by_device:
        raise ValueError(
            f"{name}: the profile holds no execution from start to end; profile several steps, and "
            "wait for the last one before the profile ends"
        )
    devices = tuple(_device(name, runs) for name, runs in by_device.items())
    middle = {
        quantity: statistics.median(getattr(device, quantity) for device in devices)
        for quantity in ("step", "compute", "communication", "exposed", "idle")
    }
    every = [run for runs in by_device.values() for run in runs]
    nearest = min(every, key=lambda run: abs(run.step - middle["step"]))
    return MeasuredReport(
        micro_batches=count,
        module=name,
        **middle,
        hidden=middle["communication"] - middle["exposed"],
        matched=_matched(every, known),
        devices=devices,
        collectives=_collectives(by_device),
        stages=_stages(by_device),
        timeline=_timeline(nearest),
    )


def _device(name: str, runs: Sequence[_Execution]) -> MeasuredDevice:
    def median(of: Callable[[_Execution], float]) -> float:
        return statistics.median(of(run) for run in runs)

    return MeasuredDevice(
        name=name,
        executions=len(runs),
        step=median(lambda run: run.step),
        compute=median(lambda run: _length(run.compute)),
        communication=median(lambda run: _length(run.communication)),
        exposed=median(lambda run: _length(run.exposed)),
        idle=median(lambda run: run.idle),
    )


def executions(
    events: Sequence[DeviceEvent],
    unnamed: Sequence[DeviceEvent],
    module: Module,
    known: Mapping[str, Known],
) -> list[list[DeviceEvent]]:
    """The executions of a program on one device that a profile holds from start to end.

    Args:
        events: of the program on the device.
        unnamed: those of the device that tell no module; each counts for the execution that it
            starts in.
        module: the program.
        known: its instructions.

    Raises:
        ValueError: nothing tells where an execution ends.
    """
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    if all(event.run for event in ordered):
        runs: dict[str, list[DeviceEvent]] = {}
        for event in ordered:
            runs.setdefault(event.run, []).append(event)
        parts = list(runs.values())
    else:
        parts = _cut(ordered, module, known)
    once = {i.name for i in module.entry.instructions} & known.keys()
    names = [{event.hlo_op for event in part} & once for part in parts]
    seen = Counter(name for of in names for name in of)
    needed = {name for name, times in seen.items() if 2 * times > len(parts)}
    whole = [part for part, of in zip(parts, names, strict=True) if needed <= of]
    for part in whole:
        start, end = part[0].start, max(event.end for event in part)
        part += [event for event in unnamed if start <= event.start < end]
    return whole


def _cut(
    ordered: Sequence[DeviceEvent], module: Module, known: Mapping[str, Known]
) -> list[list[DeviceEvent]]:
    """Executions of which nothing tells the number, by what runs once in each.

    Between the last such instruction of an execution and the first of the next one, the longest
    time in which nothing runs is where one ends.
    """
    times = Counter(event.hlo_op for event in ordered)
    entry = [i.name for i in module.entry.instructions if i.name in times]
    once = [name for name in entry if name in known and known[name].role == "compute"]
    if not once:
        raise ValueError(
            f"{module.name}: no kernel tells which instruction outside of loops it belongs to, so "
            "nothing tells where a step ends. Kernels of command buffers do not: profile with "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    usual, _ = Counter(times[name] for name in once).most_common(1)[0]
    once = [name for name in once if times[name] == usual]
    first, last = once[0], once[-1]
    firsts = [place for place, event in enumerate(ordered) if event.hlo_op == first]
    lasts = [place for place, event in enumerate(ordered) if event.hlo_op == last]
    parts = []
    for begun in firsts:
        following = next((place for place in firsts if place > begun), len(ordered))
        end = next((place for place in lasts if begun <= place < following), None)
        if end is None:
            continue  # cut off
        before = max((place for place in lasts if place < begun), default=-1)
        start = _longest_pause(ordered, before + 1, begun)
        stop = _longest_pause(ordered, end + 1, following)
        parts.append(list(ordered[start:stop]))
    return parts


def _longest_pause(ordered: Sequence[DeviceEvent], low: int, high: int) -> int:
    """The place from `low` to `high` before which nothing runs for the longest time."""
    if low == 0 or high == len(ordered):  # no execution before, or none after
        return high if low else 0
    reached = max(event.end for event in ordered[:low])
    best, longest = high, float("-inf")
    for place in range(low, high + 1):
        pause = ordered[place].start - reached
        if pause > longest:
            best, longest = place, pause
        reached = max(reached, ordered[place].end)
    return best


def _execution(events: Sequence[DeviceEvent], known: Mapping[str, Known]) -> _Execution:
    kernels: list[tuple[DeviceEvent, Known]] = []
    transfers: list[tuple[Interval, Known]] = []
    told = set()  # collectives whose flight a line of its own tells
    issued: dict[str, DeviceEvent] = {}
    flights: list[tuple[Interval, Known]] = []
    for event in sorted(events, key=lambda event: event.start):
        what = known.get(event.hlo_op) or _guess(event)
        if what is None or what.role == "container":
            continue
        if event.line == ASYNC_OPS:
            if what.role != "compute":
                started = known.get(what.name, what)
                told.add(started.name)
                transfers.append(((event.start, event.end), started))
        elif event.line == OPS and what.asynchronous:
            issued[what.name] = event
        elif what.role == "done":
            if what.name in issued:
                flight = issued.pop(what.name).start, event.end
                flights.append((flight, known[what.name]))
        elif what.role == "transfer":
            transfers.append(((event.start, event.end), what))
        else:
            kernels.append((event, what))
    transfers += [(flight, what) for flight, what in flights if what.name not in told]
    compute = union((event.start, event.end) for event, _ in kernels)
    communication = union(interval for interval, _ in transfers)
    return _Execution(
        start=min(event.start for event in events),
        end=max(event.end for event in events),
        kernels=kernels,
        transfers=sorted(transfers, key=lambda transfer: transfer[0]),
        compute=compute,
        communication=communication,
        exposed=without(communication, compute),
    )


def _guess(event: DeviceEvent) -> Known | None:
    """What an event does whose instruction is not in the step, by its names; None: not its own."""
    if "nccl" in event.name.lower() or event.name == "MemcpyP2P":
        return Known("transfer", event.hlo_op or event.name, kind="unknown")
    for kind in COLLECTIVES:
        if event.hlo_op.startswith(kind):
            role: Literal["done", "transfer"] = "done" if "-done" in event.hlo_op else "transfer"
            return Known(role, event.hlo_op, kind=kind)
    if not event.hlo_op and event.name.startswith(("Memcpy", "Memset")):
        return None  # between host and device, for whatever program
    return Known("compute", event.hlo_op or event.name)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order, over the same times."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What is left of disjoint intervals in order outside of others."""
    left: list[Interval] = []
    for start, end in intervals:
        at = bisect_right(taken, start, key=lambda one: one[1])
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _matched(runs: Iterable[_Execution], known: Mapping[str, Known]) -> float:
    busy = matched = 0.0
    for run in runs:
        spans = [(event.end - event.start, what) for event, what in run.kernels]
        spans += [(end - start, what) for (start, end), what in run.transfers]
        busy += sum(seconds for seconds, _ in spans)
        matched += sum(seconds for seconds, what in spans if what.name in known)
    return matched / busy if busy else 1.0


def _medians(
    by_device: Mapping[str, Sequence[_Execution]],
    sums: Callable[[_Execution], dict[Any, list[float]]],
) -> dict[Any, list[float]]:
    """Medians over executions, then over devices, of sums by key; 0 where a key is missing."""
    found = {name: [sums(run) for run in runs] for name, runs in by_device.items()}
    sizes = {
        key: len(values) for runs in found.values() for run in runs for key, values in run.items()
    }

    def median(key: Any, number: int) -> float:
        missing = [0.0] * sizes[key]
        return statistics.median(
            statistics.median(run.get(key, missing)[number] for run in runs)
            for runs in found.values()
        )

    return {key: [median(key, number) for number in range(size)] for key, size in sizes.items()}


def _collectives(
    by_device: Mapping[str, Sequence[_Execution]],
) -> tuple[MeasuredCollective, ...]:
    names: dict[tuple[str, str], str] = {}

    def sums(run: _Execution) -> dict[tuple[str, str], list[float]]:
        of: dict[tuple[str, str], list[float]] = {}
        for interval, what in run.transfers:
            key = what.scope or what.name, what.kind
            names.setdefault(key, what.name)
            seconds = of.setdefault(key, [0.0, 0.0])
            seconds[0] += interval[1] - interval[0]
            seconds[1] += _length(without([interval], run.compute))
        return of

    return tuple(
        MeasuredCollective(
            names[where, kind],
            kind,
            where if where != names[where, kind] else "",
            seconds,
            seconds - exposed,
            exposed,
        )
        for (where, kind), (seconds, exposed) in _medians(by_device, sums).items()
    )


def _stages(by_device: Mapping[str, Sequence[_Execution]]) -> tuple[MeasuredStage, ...]:
    def sums(run: _Execution) -> dict[str, list[float]]:
        of: dict[str, list[float]] = {}
        for event, what in run.kernels:
            of.setdefault(what.scope, [0.0] * 3)[0] += event.end - event.start
        for interval, what in run.transfers:
            seconds = of.setdefault(what.scope, [0.0] * 3)
            seconds[1] += interval[1] - interval[0]
            seconds[2] += _length(without([interval], run.compute))
        return of

    return tuple(
        MeasuredStage(scope, compute, sent, sent - exposed, exposed)
        for scope, (compute, sent, exposed) in _medians(by_device, sums).items()
    )


def _timeline(run: _Execution) -> Timeline:
    """The execution as two lanes, from its start.

    Nothing overlaps within a lane: what began before keeps its time. So sums are those of the
    report.
    """
    kernels = [((event.start, event.end), what) for event, what in run.kernels]
    compute = [
        Event("compute", what.name, what.op_name, what.source, start - run.start, end - run.start)
        for (start, end), what in _one_by_one(kernels)
    ]
    timeline = Timeline(events=list(compute), step=run.step)
    for (start, end), what in _one_by_one(run.transfers):
        event = Event(
            "link", what.name, what.op_name, what.source, start - run.start, end - run.start,
            what.kind,
        )  # fmt: skip
        beside: dict[str, float] = {}
        for other in compute:
            shared = min(event.end, other.end) - max(event.start, other.start)
            if shared > 0:
                beside[other.name] = beside.get(other.name, 0.0) + shared
        timeline.events.append(event)
        timeline.transfers.append(
            Transfer(
                event=event,
                bytes=0.0,  # a profile does not tell
                waited=_length(without([(start, end)], run.compute)),
                computed=sum(beside.values()),
                beside=tuple(sorted(beside.items(), key=lambda item: -item[1])),
                synchronous=not what.asynchronous,
                queued=0.0,
            )
        )
    timeline.events.sort(key=lambda event: event.start)
    return timeline


def _one_by_one(
    spans: Sequence[tuple[Interval, Known]],
) -> list[tuple[Interval, Known]]:
    """Without what of each span runs beside those that began before it."""
    kept: list[tuple[Interval, Known]] = []
    reached = float("-inf")
    for (start, end), what in sorted(spans, key=lambda span: span[0]):
        if end > max(start, reached):
            kept.append(((max(start, reached), end), what))
            reached = end
    return kept

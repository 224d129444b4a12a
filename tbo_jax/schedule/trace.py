"""Write modelled timelines as a Chrome trace, which Perfetto opens (https://ui.perfetto.dev).

One process per timeline, one thread per lane. The names are those that `run_layers` gives its
stages, which `find_scope` reads out of the compiler's metadata.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tbo_jax.schedule.scopes import Scope, find_scope
from tbo_jax.schedule.timeline import Event, Lane, Timeline, Transfer

_THREADS: dict[Lane, int] = {"compute": 1, "link": 2}
_ROUNDING = 1e-12  # seconds: far below any event, far above what sums of times are off


def short_name(event: Event) -> str:
    """The stage and the operation, `attend/dot_general`; without a scope, the instruction."""
    scope = find_scope(event.op_name)
    if scope is None:
        return event.name
    operation = event.op_name.rsplit("/", 1)[-1].rstrip(")")
    return scope.label if operation == scope.function else f"{scope.label}/{operation}"


@dataclass
class Span:
    """A stage on the compute lane, from its first to its last instruction without a break."""

    scope: Scope
    start: float
    end: float
    first: str  # instruction


def stage_spans(timeline: Timeline) -> list[Span]:
    """The stages on the compute lane. What has no scope neither opens nor breaks one."""
    spans: list[Span] = []
    reached, names = 0.0, set[str]()
    for event in timeline.events:
        if event.lane == "link":
            continue
        if event.start > reached + _ROUNDING:
            names.clear()  # compute stood still, and what follows is a span of its own
        reached = event.end
        scope = find_scope(event.op_name)
        if scope is None:
            continue
        # A name that comes again is the next turn of a loop over layers.
        if names and spans[-1].scope == scope and event.name not in names:
            spans[-1].end = event.end
        else:
            spans.append(Span(scope, event.start, event.end, event.name))
            names.clear()
        names.add(event.name)
    return spans


def middle_layers(timeline: Timeline) -> tuple[str, float, float] | None:
    """Two layers near the middle, or two turns of the loop over them: their names, start and end.

    They end where the layer after them starts. Of the forward pass; None without scopes.
    """
    spans = [span for span in stage_spans(timeline) if not span.scope.backward]
    loop = [span for span in spans if span.scope.index is None]
    if loop:
        turns = [span.start for span in loop if span.first == loop[0].first]
        starts = {f"{number}": start for number, start in enumerate(turns)}
    else:
        # A compiler may hoist small parts of a layer far ahead: the longest span of a stage counts.
        longest = {span.scope: span for span in sorted(spans, key=lambda s: s.end - s.start)}
        starts = {}
        for scope, span in sorted(longest.items(), key=lambda item: item[1].start):
            starts.setdefault(f"{scope.index}", span.start)
    if not starts:
        return None
    shown = list(starts)[max(0, len(starts) - 2) // 2 :][:3]
    if len(shown) == 3:
        end = starts[shown[2]]
    else:
        scoped = [(event.end, find_scope(event.op_name)) for event in timeline.events]
        end = max(end for end, scope in scoped if scope and not scope.backward)
    what = f"{'turn' if loop else 'layer'}{'s' * (len(shown) > 1)} {' and '.join(shown[:2])}"
    return what + " of the loop" * bool(loop), starts[shown[0]], end


def write_trace(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines as one Chrome trace: processes named by the mapping's keys, in its order.

    On the compute lane a slice of category "stage" encloses the instructions of a stage. An arrow
    leads from the compute before a collective's start to the collective, and on to the compute
    that its done lets run. The format's times are microseconds; these keep nanoseconds.

    Raises:
        ValueError: no timelines.
        OSError: the file cannot be written.
    """
    if not timelines:
        raise ValueError("no timelines to write: expected at least one")
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _process(process, name)
        events += _slices(process, timeline)
        events += _arrows(process, timeline)
    document = {"traceEvents": events, "displayTimeUnit": "ns"}
    Path(path).write_text(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


def _process(process: int, name: str) -> list[dict[str, Any]]:
    def metadata(what: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "args": args}

    named = [
        metadata("process_name", name=name),
        metadata("process_sort_index", sort_index=process),
    ]
    for lane, thread in _THREADS.items():
        named.append(metadata("thread_name", name=lane) | {"tid": thread})
        named.append(metadata("thread_sort_index", sort_index=thread) | {"tid": thread})
    return named


def _slices(process: int, timeline: Timeline) -> list[dict[str, Any]]:
    transfers = {transfer.event: transfer for transfer in timeline.transfers}
    slices = [
        _slice(process, "compute", span.scope.label, "stage", span, _scope_args(span.scope))
        for span in stage_spans(timeline)
    ]
    for event in timeline.events:
        args = _args(event, transfers.get(event))
        kind = event.kind or event.lane
        slices.append(_slice(process, event.lane, short_name(event), kind, event, args))
    return sorted(slices, key=lambda item: item["ts"])  # stable: a stage stays before what it holds


def _slice(
    process: int, lane: Lane, name: str, category: str, extent: Event | Span, args: dict[str, Any]
) -> dict[str, Any]:
    start, end = _nanoseconds(extent.start), _nanoseconds(extent.end)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": _THREADS[lane],
        "ts": start / 1000,
        "dur": (end - start) / 1000,  # of rounded ends, so that neighbours never overlap
        "args": args,
    }


def _scope_args(scope: Scope) -> dict[str, Any]:
    return {"layer": scope.layer, "micro_batch": scope.micro_batch}


def _args(event: Event, transfer: Transfer | None) -> dict[str, Any]:
    args: dict[str, Any] = {
        "instruction": event.name,
        "op_name": event.op_name,
        "source": event.source,
    }
    scope = find_scope(event.op_name)
    if scope is not None:
        args |= _scope_args(scope)
    if transfer is not None:
        args |= {
            "bytes": transfer.bytes,
            "hidden": _nanoseconds(transfer.hidden) / 1000,
            "exposed": _nanoseconds(transfer.waited) / 1000,
            "queued": _nanoseconds(transfer.queued) / 1000,
            "synchronous": transfer.synchronous,
        }
    return args


def _arrows(process: int, timeline: Timeline) -> list[dict[str, Any]]:
    """The flow events: from compute at a collective's start, through it, to compute at its done."""
    transfers = {transfer.event: transfer for transfer in timeline.transfers}
    compute = [event for event in timeline.events if event.lane == "compute"]
    starts = [event.start for event in compute]
    arrows: list[dict[str, Any]] = []
    done = 0  # index of the first compute event after the done: events stand in program order
    for number, event in enumerate(timeline.events):
        if event.lane == "compute":
            done += 1
            continue
        issued = event.start - (transfers[event].queued if event in transfers else 0.0)
        started = bisect_left(starts, issued - _ROUNDING)
        stops = [*compute[max(0, started - 1) : started], event, *compute[done : done + 1]]
        for place, stop in enumerate(stops if len(stops) > 1 else ()):
            arrow = {
                "ph": "s" if place == 0 else "f" if place == len(stops) - 1 else "t",
                "id": f"{process}.{number}",
                "name": short_name(event),
                "cat": "flow",
                "pid": process,
                "tid": _THREADS[stop.lane],
                # The middle: at a boundary viewers would have to guess to which slice it belongs.
                "ts": _nanoseconds((stop.start + stop.end) / 2) / 1000,
            }
            arrows.append(arrow | ({"bp": "e"} if arrow["ph"] == "f" else {}))
    return arrows


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

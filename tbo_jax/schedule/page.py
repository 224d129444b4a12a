"""Write schedule reports as one HTML page that fetches nothing: lanes to zoom, figures, findings.

The parts of the page lie in the folder page/. The text is made here and is there without scripts;
page.js draws the lanes from the data that the page holds.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tbo_jax.schedule.audit import Finding
from tbo_jax.schedule.colours import EXPOSED, NO_SCOPE, colour_of
from tbo_jax.schedule.report import CollectiveReport, ScheduleReport
from tbo_jax.schedule.scopes import Scope, find_scope
from tbo_jax.schedule.table import (
    beside_text,
    collective_label,
    megabytes,
    microseconds,
    milliseconds,
    notes_of,
    program_name,
    summary_table,
)
from tbo_jax.schedule.targets import Target
from tbo_jax.schedule.timeline import Event, Transfer
from tbo_jax.schedule.trace import short_name, stage_spans

MOST_BESIDE = 6  # kernels that are named beside a collective
Place = tuple[str, int]  # of an event: its lane, and its number there


def write_page(
    path: str | Path,
    title: str,
    reports: Sequence[ScheduleReport],
    facts: Mapping[str, str] | None = None,
    layers_left_out: int = 0,
) -> None:
    """Write reports of one step as a page: their lanes one above the other, from the same zero.

    Args:
        path: where to.
        title: of the page.
        reports: of the programs to compare, such as one and two micro-batches.
        facts: what else to say of them, by name (`facts_of`).
        layers_left_out: of the program; the figures extrapolate the step to them.

    Raises:
        ValueError: no reports, or one without events.
        OSError: the file cannot be written.
    """
    if not reports or not all(report.timeline.events for report in reports):
        counts = [len(report.timeline.events) for report in reports]
        raise ValueError(f"expected reports of steps with events, got {counts} events")
    script, style = (_part(name) for name in ("page.js", "page.css"))
    programs = [_Program(report) for report in reports]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    table = summary_table(reports, layers_left_out)
    page = environment.from_string(_part("page.html")).render(
        title=title,
        facts=facts or {},
        script=Markup(script),
        style=Markup(style),
        # Nothing but these two runs, and nothing is fetched, whatever a name in a program says.
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        legend=_legend(reports),
        head=[column.header for column in table.columns],
        rows=list(zip(*[column.cells for column in table.columns], strict=True)),
        programs=[program.text(layers_left_out) for program in programs],
        data={
            "exposed": EXPOSED,
            "programs": [program.lanes() for program in programs],
        },
    )
    Path(path).write_text(page, encoding="utf-8")


def facts_of(values: Mapping[str, Any], target: Target) -> dict[str, str]:
    """The setting, prices and versions of what `--json` writes, as people read them."""
    return {
        **{name.replace("_", " "): str(value) for name, value in values["setting"].items()},
        "prices": target.rates.describe(),
        "versions": ", ".join(f"{name} {version}" for name, version in values["versions"].items()),
    }


def _part(name: str) -> str:
    return (resources.files("tbo_jax.schedule") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _legend(reports: Sequence[ScheduleReport]) -> dict[str, str]:
    scopes = [find_scope(event.op_name) for report in reports for event in report.timeline.events]
    numbers = sorted({scope.micro_batch for scope in scopes if scope is not None})
    return {f"micro-batch {n}": colour_of(n) for n in numbers} | {"outside the stages": NO_SCOPE}


class _Program:
    """A report, and where its events stand in the lanes of the page."""

    def __init__(self, report: ScheduleReport):
        self.report = report
        self.transfers = {transfer.event: transfer for transfer in report.timeline.transfers}
        self.collectives = {c.name: c for c in report.collectives}
        self.places: dict[str, Place] = {}  # of the first event of an instruction
        self.longest: dict[str, tuple[float, Place]] = {}  # of a collective: its longest wait
        self.kinds: dict[tuple[str, ...], int] = {}  # numbers of what is said of events
        self.drawn: dict[str, list[list[Any]]] = {"stages": [], "compute": [], "link": []}
        for span in stage_spans(report.timeline):
            kind = self._kind(_stage_label(span.scope), span.scope)
            self.drawn["stages"].append([_us_of(span.start), _us_of(span.end), kind])
        for event in report.timeline.events:
            self._place(event)

    def lanes(self) -> dict[str, Any]:
        """What page.js draws. Times are in microseconds, with nanoseconds."""
        keys = ("label", "instruction", "scope", "source", "colour")
        report = self.report
        return {
            "heading": f"{program_name(report.micro_batches, report.expert_chunks)}: step "
            f"{milliseconds(report.step)}, communication {milliseconds(report.communication)}, "
            f"exposed {milliseconds(report.exposed)}",
            "step": _us_of(report.step),
            "kinds": [dict(zip(keys, kind, strict=True)) for kind in self.kinds],
            "lanes": self.drawn,
        }

    def text(self, layers_left_out: int) -> dict[str, Any]:
        """What stands below the lanes."""
        return {
            "name": program_name(self.report.micro_batches, self.report.expert_chunks),
            "notes": notes_of(self.report, layers_left_out),
            "findings": [self._finding(finding) for finding in self.report.findings],
            "collectives": [self._collective(c) for c in self.report.collectives],
        }

    def _place(self, event: Event) -> None:
        scope = find_scope(event.op_name)
        kind = self._kind(short_name(event), scope, event.name, event.source)
        lane = self.drawn[event.lane]
        place = (event.lane, len(lane))
        self.places.setdefault(event.name, place)
        drawn: list[Any] = [_us_of(event.start), _us_of(event.end), kind]
        transfer = self.transfers.get(event)
        if transfer is not None:
            drawn.append(self._transfer(transfer))
            if event.name not in self.longest or transfer.waited > self.longest[event.name][0]:
                self.longest[event.name] = transfer.waited, place
        lane.append(drawn)

    def _kind(
        self, label: str, scope: Scope | None, instruction: str = "", source: str = ""
    ) -> int:
        where, colour = "", NO_SCOPE
        if scope is not None:
            where = f"{scope.layer}/micro_batch_{scope.micro_batch}/{scope.label}"
            colour = colour_of(scope.micro_batch)
        kind = (label, instruction, where, source, colour)
        return self.kinds.setdefault(kind, len(self.kinds))

    def _transfer(self, transfer: Transfer) -> dict[str, Any]:
        exposed = _us_of(transfer.waited)
        collective = self.collectives[transfer.event.name]
        turn = "in its last turn: " if collective.turns > 1 and collective.reason else ""
        return {
            "kind": transfer.event.kind,
            "sent": megabytes(transfer.bytes),
            "hidden": _us_of(transfer.hidden),
            "exposed": exposed,
            "reason": turn + collective.reason if exposed else "",
            "beside": [[name, _us_of(s)] for name, s in transfer.beside[:MOST_BESIDE]],
            "more": max(0, len(transfer.beside) - MOST_BESIDE),
        }

    def _finding(self, finding: Finding) -> dict[str, Any]:
        return {
            "kind": finding.kind,
            "size": megabytes(finding.bytes),
            "instruction": finding.instruction,
            "source": finding.source or finding.op_name or "unknown place",
            "place": self.places.get(finding.instruction),
        }

    def _collective(self, collective: CollectiveReport) -> dict[str, Any]:
        seconds = (collective.seconds, collective.hidden, collective.exposed)
        return {
            "label": collective_label(collective),
            "figures": [megabytes(collective.bytes), *map(microseconds, seconds)],
            "exposed": bool(collective.reason),
            "beside": collective.reason or beside_text(collective),
            "source": collective.source,
            "place": self.longest[collective.name][1],
        }


def _stage_label(scope: Scope) -> str:
    return scope.label if scope.index is None else f"{scope.label}, layer {scope.index}"


def _us_of(seconds: float) -> float:
    return round(seconds * 1e9) / 1000

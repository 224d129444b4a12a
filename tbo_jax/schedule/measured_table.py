"""Measured times beside modelled ones, as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from tbo_jax.schedule.measured import MeasuredReport
from tbo_jax.schedule.report import ScheduleReport, scope_of
from tbo_jax.schedule.scopes import BACKWARD
from tbo_jax.schedule.table import microseconds, milliseconds, program_name, wide_console
from tbo_jax.schedule.timeline import Timeline

_ALL_KNOWN = 0.98  # of the busy time: below it the table says how much is


def print_measured(
    measured: Mapping[int, MeasuredReport], modelled: Mapping[int, ScheduleReport], note: str = ""
) -> None:
    """Print what was measured, each number beside the modelled one where there is one."""
    console = wide_console()
    some = next(iter(measured.values()))
    console.print(
        f"\nMeasured: medians of {some.executions} executions on {len(some.devices)} device(s), "
        "and the least and the most of the devices' medians"
        + (", beside the model." if modelled else ".")
    )
    if note:
        console.print(note)
    for count in modelled.keys() - measured.keys():
        console.print(f"No program of the profile is the step with {program_name(count)}.")
    console.print(_summary(measured, modelled))
    for count, report in measured.items():
        console.print(f"\n{program_name(count)}: stages, sums over the layers")
        console.print(_stages(report, modelled.get(count)))
        console.print(f"\n{program_name(count)}: collectives, sums over the layers")
        console.print(_collectives(report, modelled.get(count)))
        if report.matched < _ALL_KNOWN:
            console.print(
                f"{1 - report.matched:.1%} of the busy time is of kernels that name no instruction "
                "of this step. On GPU, kernels of command buffers do not: profile with "
                "XLA_FLAGS=--xla_gpu_enable_command_buffer="
            )


def _summary(
    measured: Mapping[int, MeasuredReport], modelled: Mapping[int, ScheduleReport]
) -> Table:
    columns: list[str] = []
    for count in measured:
        columns += [program_name(count), *(["modelled"] if count in modelled else [])]
    table = _table("", *columns)

    def row(label: str, quantity: str) -> None:
        cells = []
        for count, report in measured.items():
            cells.append(_cell(report, quantity))
            if count in modelled:
                cells.append(_modelled(modelled[count], quantity))
        table.add_row(label, *cells)

    row("step", "step")
    row("compute", "compute")
    row("communication", "communication")
    row("  hidden", "hidden_share")
    row("  exposed", "exposed")
    row("idle", "idle")
    if 1 in measured and len(measured) > 1:
        cells = []
        for count, report in measured.items():
            cells.append(f"{measured[1].step / report.step:.3f}")
            if count in modelled:
                alone = modelled.get(1)
                cells.append(f"{alone.step / modelled[count].step:.3f}" if alone else "")
        table.add_row("speed-up over 1 micro-batch", *cells)
    return table


def _cell(report: MeasuredReport, quantity: str) -> str:
    if quantity == "hidden_share":
        return f"{report.hidden_share:.1%}"
    shown = milliseconds(getattr(report, quantity))
    if len(report.devices) > 1:
        low, high = report.spread(quantity)
        shown += f" ({low * 1e3:.3f} to {high * 1e3:.3f})"
    return shown


def _modelled(report: ScheduleReport, quantity: str) -> str:
    if quantity == "idle":
        return ""  # the model has no host to wait for
    value = getattr(report, quantity)
    return f"{value:.1%}" if quantity == "hidden_share" else milliseconds(value)


Sums = dict[tuple[str, ...], list[float]]


def _add(sums: Sums, key: tuple[str, ...], values: Sequence[float]) -> None:
    before = sums.setdefault(key, [0.0] * len(values))
    sums[key] = [a + b for a, b in zip(before, values, strict=True)]


def _stage_key(scope: str) -> tuple[str, ...]:
    """Stage and micro-batch of layer_2/micro_batch_1/dispatch, without the layer."""
    found = re.fullmatch(r"[^/]+/micro_batch_(\d+)/(.+)", scope)
    return (found[2], found[1]) if found else ("outside of layers", "")


def _stages(report: MeasuredReport, modelled: ScheduleReport | None) -> Table:
    sums: Sums = {}
    for stage in report.stages:
        _add(sums, _stage_key(stage.scope), (stage.compute, stage.communication, stage.exposed))
    other: Sums = {}
    if modelled is not None:
        for event in modelled.timeline.events:
            if event.lane == "compute":
                _add(other, _stage_key(scope_of(event.op_name)), (event.seconds, 0.0, 0.0))
        for transfer in modelled.timeline.transfers:
            values = 0.0, transfer.event.seconds, transfer.waited
            _add(other, _stage_key(scope_of(transfer.event.op_name)), values)
    return _side_by_side(("stage", "micro-batch"), sums, other, ("compute", "sent", "exposed"))


def _collectives(report: MeasuredReport, modelled: ScheduleReport | None) -> Table:
    sums: Sums = {}
    for c in report.collectives:
        key = (*_stage_key(c.scope), c.kind)
        _add(sums, key, (c.seconds, c.hidden, c.exposed))
    other: Sums = {}
    for d in modelled.collectives if modelled else ():
        values = d.turns * d.seconds, d.turns * d.hidden, d.turns * d.exposed
        _add(other, (*_stage_key(d.scope), d.kind), values)
    keys = "stage", "micro-batch", "collective"
    return _side_by_side(keys, sums, other, ("time", "hidden", "exposed"))


def _side_by_side(keys: Sequence[str], sums: Sums, other: Sums, quantities: Sequence[str]) -> Table:
    """A line for each key, each quantity measured and, where there is a model, modelled."""
    columns: list[str] = []
    for quantity in quantities:
        columns += [quantity, *(["modelled"] if other else [])]
    table = _table(*keys, *columns, left=len(keys))
    for key in sorted({*sums, *other}, key=_forward_first):
        cells = []
        for number in range(len(quantities)):
            cells.append(microseconds(sums[key][number]) if key in sums else "-")
            if other:
                cells.append(microseconds(other[key][number]) if key in other else "-")
        table.add_row(*key, *cells)
    return table


def _forward_first(key: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    return key[0].endswith(BACKWARD), key


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[left:]:
        column.justify = "right"
    return table


def timelines_of(measured: Iterable[MeasuredReport]) -> dict[str, Timeline]:
    """Timelines for pictures and traces, by name."""
    return {
        f"{program_name(report.micro_batches)}, measured": report.timeline for report in measured
    }

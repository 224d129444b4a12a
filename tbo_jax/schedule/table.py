"""The report as people read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tbo_jax.schedule.compare import Change
from tbo_jax.schedule.report import CollectiveReport, ScheduleReport, layer_body, layer_seconds
from tbo_jax.schedule.targets import Target

WIDTH = 150  # columns, where no terminal says how many it has
MOST_FINDINGS = 8  # kinds and places, printed for each program


def wide_console() -> Console:
    """A console of the terminal's width, or of `WIDTH` columns where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_report(
    title: str, reports: Sequence[ScheduleReport], target: Target, layers_left_out: int = 0
) -> None:
    """Print the table of all reports, then the collectives and findings of each.

    With layers left out of the program, a line extrapolates the step to all of them.
    """
    console = wide_console()
    console.print(title)
    console.print(f"Times are modelled: XLA's order, priced at {target.rates.describe()}.\n")
    console.print(summary_table(reports, layers_left_out))
    for report in reports:
        console.print(
            f"\n{program_name(report.micro_batches, report.expert_chunks)}: collectives of a layer"
        )
        console.print(_collective_table(report))
        for line in (*finding_lines(report), *notes_of(report, layers_left_out)):
            console.print(line)


def print_changes(
    changes: Sequence[Change], before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Print two reports beside each other, and what got worse."""
    console = Console(highlight=False)
    versions = [
        ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
        for report in (before, now)
    ]
    console.print(f"\nAgainst a report of {versions[0]} (now {versions[1]})")
    table = Table("program", "", "before", "now", "", box=None, pad_edge=False)
    for column in table.columns[2:4]:
        column.justify = "right"
    for change in changes:
        shown = _SHOWN.get(change.quantity, "{:.0f}".format)
        table.add_row(
            program_name(change.micro_batches, change.expert_chunks),
            change.quantity.replace("_", " "),
            shown(change.before),
            shown(change.now),
            "worse" if change.worse else "",
        )
    console.print(table)


def program_name(micro_batches: int, expert_chunks: int = 1) -> str:
    """What a program is called, by the number of its micro-batches or expert chunks."""
    if expert_chunks > 1:
        return f"{expert_chunks} expert chunks"
    return f"{micro_batches} micro-batch" + ("es" if micro_batches > 1 else "")


def summary_table(reports: Sequence[ScheduleReport], layers_left_out: int) -> Table:
    names = [program_name(r.micro_batches, r.expert_chunks) for r in reports]
    table = Table("", *names, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    first = reports[0].step

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    row("step", [milliseconds(r.step) for r in reports])
    layer = [layer_seconds(r.timeline) for r in reports]
    if layers_left_out and None not in layer:
        whole = [r.step + layers_left_out * (t or 0) for r, t in zip(reports, layer, strict=True)]
        row("  of all layers, extrapolated", [milliseconds(seconds) for seconds in whole])
    row("compute", [milliseconds(r.compute) for r in reports])
    row("  slower beside communication", [milliseconds(r.contention) for r in reports])
    row("communication", [milliseconds(r.communication) for r in reports])
    row("  hidden", [f"{r.hidden_share:.1%}" for r in reports])
    row("  exposed", [milliseconds(r.exposed) for r in reports])
    passes = [r.hidden_by_pass() for r in reports]
    for name in passes[0] if all(passes) else ():
        label = f"  of {name}" + (" over ranks" if name == "sums" else "")
        row(label, [_hidden(*p[name]) for p in passes])
    row(
        f"speed-up over {names[0]}",
        [f"{first / r.step:.3f}" for r in reports],
    )
    row("  if all were hidden", [f"{r.ceiling(first):.3f}" for r in reports])
    row("memory traffic", [megabytes(r.memory_bytes) for r in reports])
    row("sent a device", [megabytes(r.sent_bytes) for r in reports])
    row("memory of a device", [_needed(r, 0) for r in reports])
    if layers_left_out:
        row("  of all layers, extrapolated", [_needed(r, layers_left_out) for r in reports])
    row("  temporary", [megabytes(r.temporary_bytes) for r in reports])
    row("updated in place (aliased)", [megabytes(r.aliased_bytes) for r in reports])
    row("findings", [str(len(r.findings)) for r in reports])
    row("compiled in (measured)", [f"{r.compile_seconds:.1f} s" for r in reports])
    return table


def _collective_table(report: ScheduleReport) -> Table:
    table = Table("collective", "sent", "time", "hidden", "exposed", "beside it", box=None)
    for column in table.columns[1:5]:
        column.justify = "right"
    body = layer_body(report.collectives)
    others = [c for c in report.collectives if c not in body and c.exposed > 1e-9]
    for collective in [*body, *others]:
        table.add_row(
            collective_label(collective),
            megabytes(collective.bytes),
            microseconds(collective.seconds),
            microseconds(collective.hidden),
            microseconds(collective.exposed),
            collective.reason or beside_text(collective),
        )
    return table


def collective_label(collective: CollectiveReport) -> str:
    turns = f" x{collective.turns}" if collective.turns > 1 else ""
    return f"{collective.scope or collective.name} ({collective.kind}{turns})"


def beside_text(collective: CollectiveReport) -> str:
    named = [f"{name} {microseconds(seconds)}" for name, seconds in collective.beside[:3]]
    more = len(collective.beside) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def finding_lines(report: ScheduleReport) -> list[str]:
    """The findings, those of a kind and place together."""
    lines = []
    grouped: dict[tuple[str, str], list[int]] = {}
    for finding in report.findings:
        grouped.setdefault((finding.kind, finding.source), []).append(finding.bytes)
    for (kind, source), sizes in list(grouped.items())[:MOST_FINDINGS]:
        first = next(f for f in report.findings if (f.kind, f.source) == (kind, source))
        lines.append(
            f"finding: {kind}, {len(sizes)} x {megabytes(max(sizes))}: {first.instruction} "
            f"({source or first.op_name})"
        )
    if len(grouped) > MOST_FINDINGS:
        lines.append(f"finding: and {len(grouped) - MOST_FINDINGS} more places (--json has all)")
    return lines


def notes_of(report: ScheduleReport, layers_left_out: int) -> list[str]:
    """What else is to be known of a program."""
    lines = []
    if report.memory is not None and not report.fits(layers_left_out):
        needed = f"{report.needed_with(layers_left_out) / 1e9:.1f} GB"
        of_all = " with all layers" if layers_left_out else ""
        lines.append(
            f"does not fit: {needed}{of_all} of {report.memory / 1e9:.1f} GB of memory; take fewer "
            "tokens, a shorter context or more devices"
        )
    for reason, count in Counter(report.not_priced.values()).items():
        example = next(name for name, why in report.not_priced.items() if why == reason)
        lines.append(f"not priced: {count} x {reason} ({example})")
    lines += [f"not in these times: {note}" for note in report.run_time]
    if report.assumed_loops:
        lines.append(
            f"{len(report.assumed_loops)} loops whose turns depend on data are counted once: "
            f"{', '.join(report.assumed_loops[:5])}"
        )
    return lines


def _needed(report: ScheduleReport, layers_left_out: int) -> str:
    needed = f"{report.needed_with(layers_left_out) / 1e9:.1f} GB"
    return needed if report.fits(layers_left_out) else f"{needed} (!)"


def _hidden(seconds: float, hidden: float) -> str:
    return f"{milliseconds(seconds)}, {hidden / seconds if seconds else 1:.1%} hidden"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


_SHOWN: dict[str, Callable[[float], str]] = {
    "step": milliseconds,
    "exposed": milliseconds,
    "hidden_share": "{:.1%}".format,
    "sent_bytes": megabytes,
    "memory_bytes": megabytes,
    "needed_bytes": megabytes,
}

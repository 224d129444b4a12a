"""All ways to overlap a step in one table, the best one marked."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tbo_jax.schedule.model_step import StepShape
from tbo_jax.schedule.report import ScheduleReport, layer_seconds
from tbo_jax.schedule.table import megabytes, milliseconds, program_name, wide_console
from tbo_jax.schedule.targets import Target


def best_of(reports: Sequence[ScheduleReport], layers_left_out: int = 0) -> ScheduleReport:
    """The one with the shortest step among those that fit a device, with so many more layers.

    At a tie the first one; all, if none fits.
    """
    fitting = [report for report in reports if report.fits(layers_left_out)]
    return min(fitting or reports, key=lambda report: report.step)


def strategies_table(
    steps: Sequence[tuple[StepShape, Sequence[ScheduleReport]]], layers_left_out: int = 0
) -> Table:
    """A row for each program; of each step the best has a star.

    Args:
        steps: each with the reports of its programs, the plain one first.
        layers_left_out: of the programs.
    """
    table = Table("step of", "strategy", box=None, pad_edge=False)
    columns = ("step", "all layers" if layers_left_out else None, "speed-up", "compute", "link",
               "exposed", "hidden", "weights read", "traffic", "memory")  # fmt: skip
    for name in columns:
        if name is not None:
            table.add_column(name, justify="right")
    table.add_column("")
    for shape, reports in steps:
        best = best_of(reports, layers_left_out)
        for number, report in enumerate(reports):
            layer = layer_seconds(report.timeline)
            whole = None if layer is None else report.step + layers_left_out * layer
            fits = report.fits(layers_left_out)
            cells = [
                f"{shape.phase} {shape.tokens}" if number == 0 else "",
                program_name(report.micro_batches, report.expert_chunks),
                milliseconds(report.step),
                *([milliseconds(whole) if whole else "-"] if layers_left_out else []),
                f"{reports[0].step / report.step:.3f}",
                milliseconds(report.compute),
                milliseconds(report.communication),
                milliseconds(report.exposed),
                f"{report.hidden_share:.0%}",
                "-" if report.weight_bytes is None else megabytes(report.weight_bytes),
                megabytes(report.memory_bytes),
                megabytes(report.needed_with(layers_left_out)) + ("" if fits else " (!)"),
                "* best" if report is best else "",
            ]
            table.add_row(*cells)
    return table


def print_strategies(
    title: str,
    steps: Sequence[tuple[StepShape, Sequence[ScheduleReport]]],
    target: Target,
    layers_left_out: int = 0,
) -> None:
    """Print the table, and under what prices it is."""
    console = wide_console()
    console.print(title)
    console.print(f"Times are modelled: XLA's order, priced at {target.rates.describe()}.\n")
    console.print(strategies_table(steps, layers_left_out))
    if any(not r.fits(layers_left_out) for _, reports in steps for r in reports):
        console.print("(!) does not fit a device")

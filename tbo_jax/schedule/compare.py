"""What changed between two reports of a step, so that a project can keep its overlap in CI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tbo_jax.host.json_files import read_json_object
from tbo_jax.overlap.config import Strategy

SCHEMA = 2  # of `--json`, described in docs/schedule.md; one more where a name or a unit changes
TOLERANCE = 0.02


@dataclass(frozen=True)
class Change:
    """One quantity of a program, in the unit of the report."""

    micro_batches: int
    quantity: str  # its key in the report; for `findings` their number
    before: float
    now: float
    worse: bool  # by more than the tolerance
    expert_chunks: int = 1


def read_report(path: Path) -> dict[str, Any]:
    """What `--json` wrote.

    Raises:
        ValueError: it is no such file, or one of another version.
    """
    values = read_json_object(path)
    if values.get("schema") != SCHEMA or not isinstance(values.get("reports"), list):
        raise ValueError(
            f"{path}: schema {json.dumps(values.get('schema'))} of a schedule report: expected "
            f"{SCHEMA}; write it anew with --json"
        )
    return values


def compare(
    before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = TOLERANCE
) -> list[Change]:
    """Compare the programs of two reports that have as many micro-batches and expert chunks.

    The hidden share may fall by `tolerance`; the step and what is exposed of it may grow by
    `tolerance` of the step before, and sizes by `tolerance` of themselves. Any finding more is
    worse.

    Args:
        before, now: what `--json` wrote, or `{"reports": [report.to_json(), ...]}`.
        tolerance: a share, such as 0.02.

    Raises:
        ValueError: they are of different steps (`setting`), or have no program in common; or a
            tolerance below zero.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be 0 or more, got {tolerance}")
    check_settings(before.get("setting"), now.get("setting"))
    former = {_strategy(report): report for report in before["reports"]}
    both = [report for report in now["reports"] if _strategy(report) in former]
    if not both:
        names = [
            ", ".join(str(one) for one in sorted(_strategy(report) for report in of["reports"]))
            for of in (before, now)
        ]
        raise ValueError(f"no program in common: {names[0]} before, {names[1]} now")
    return [
        change
        for report in both
        for change in _changes(former[_strategy(report)], report, tolerance)
    ]


def _strategy(report: Mapping[str, Any]) -> Strategy:
    """How the program of a report overlaps; reports of before had no chunks."""
    return Strategy(report["micro_batches"], report.get("expert_chunks", 1))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> list[Change]:
    step, chunks = before["step"], _strategy(now).expert_chunks
    allowed = {"step": step * tolerance, "exposed": step * tolerance, "hidden_share": tolerance}
    allowed |= {
        name: before[name] * tolerance for name in ("sent_bytes", "memory_bytes", "needed_bytes")
    }
    changes = []
    for name, most in allowed.items():
        grown = now[name] - before[name]
        lost = -grown if name == "hidden_share" else grown
        changes.append(
            Change(now["micro_batches"], name, before[name], now[name], lost > most + 1e-12, chunks)
        )
    findings = len(before["findings"]), len(now["findings"])
    changes.append(
        Change(now["micro_batches"], "findings", *findings, findings[1] > findings[0], chunks)
    )
    return changes


def check_settings(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Raise ValueError if two reports are of different steps, as far as they tell."""
    if before is None or now is None:
        return  # of a function of one's own
    differ = [
        f"{name} {json.dumps(before.get(name))} before, {json.dumps(now.get(name))} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differ:
        raise ValueError(f"the reports are of different steps: {'; '.join(differ)}")

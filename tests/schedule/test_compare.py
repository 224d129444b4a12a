"""Two reports of a step: what got worse, and which reports are not compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tbo_jax.schedule.compare import SCHEMA, compare, read_report
from tbo_jax.schedule.table import print_changes
from tests.schedule.test_report import of_fixture


def values(**changes: Any) -> dict[str, Any]:
    report = of_fixture("gpu_unrolled").to_json()
    return {"schema": SCHEMA, "reports": [report | changes]}


REPORT = values()["reports"][0]


def worse(now: dict[str, Any], tolerance: float = 0.02) -> list[str]:
    return [c.quantity for c in compare(values(), now, tolerance) if c.worse]


def test_the_same_is_not_worse() -> None:
    assert worse(values(), 0.0) == []
    assert [c.before for c in compare(values(), values())] == [
        c.now for c in compare(values(), values())
    ]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hidden_share", lambda v, by: v - by),
        ("step", lambda v, by: v * (1 + by)),
        ("exposed", lambda v, by: v + REPORT["step"] * by),
        ("sent_bytes", lambda v, by: v * (1 + by)),
        ("memory_bytes", lambda v, by: v * (1 + by)),
        ("needed_bytes", lambda v, by: v * (1 + by)),
    ],
)
def test_what_passes_the_tolerance_is_worse(
    name: str, change: Callable[[float, float], float]
) -> None:
    assert worse(values(**{name: change(REPORT[name], 0.03)})) == [name]
    assert worse(values(**{name: change(REPORT[name], 0.01)})) == []
    assert worse(values(**{name: change(REPORT[name], -0.3)})) == []  # better
    assert worse(values(**{name: change(REPORT[name], 0.03)}), 0.04) == []


def test_one_finding_more_is_worse() -> None:
    more = [*REPORT["findings"], {"kind": "copy"}]
    assert worse(values(findings=more), 1.0) == ["findings"]


def test_programs_in_common_are_compared() -> None:
    both = values()
    both["reports"].append(both["reports"][0] | {"micro_batches": 1})
    assert {c.micro_batches for c in compare(values(), both)} == {2}
    with pytest.raises(ValueError, match="in common: micro_batches 2 before, micro_batches 4 now"):
        compare(values(), values(micro_batches=4))


def test_different_steps_are_refused() -> None:
    before = values() | {"setting": {"tokens": 256, "phase": "decode"}}
    now = values() | {"setting": {"tokens": 128, "phase": "decode"}}
    with pytest.raises(ValueError, match="different steps: tokens 256 before, 128 now$"):
        compare(before, now)
    assert compare(before, values())  # of a function of one's own, that tells no setting


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_a_tolerance_below_zero_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be 0 or more"):
        compare(values(), values(), tolerance)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"schema": 1, "reports": []}', "schema 1 of a schedule report: expected 2"),
        ("{}", "schema null"),
        ('{"schema": 1}', "schema 1"),
        ("[1]", "r.json"),
        ("{", "r.json"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        read_report(path)
    path.write_text(json.dumps(values()))
    assert read_report(path)["reports"][0]["micro_batches"] == 2


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    before = values() | {"versions": {"jax": "0.10.2"}}
    now = values(hidden_share=0.125) | {"versions": {"jax": "0.12.0"}}
    print_changes(compare(before, now), before, now)
    printed = capsys.readouterr().out
    assert "jax 0.10.2 (now jax 0.12.0)" in printed
    (line,) = [line for line in printed.splitlines() if "hidden share" in line]
    assert "12.5%" in line and line.rstrip().endswith("worse")

"""benchmarks/host.py runs and its figures are those of a step in which every row decodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [["--look-ahead"], ["--no-look-ahead"], ["--speculate", "2"]], ids=" ".join
)
def test_figures(tmp_path: Path, given: list[str]) -> None:
    options = ["--ranks", "2", "--rows", "8", "--context", "100", "--steps", "4", *given]
    command = [sys.executable, "benchmarks/host.py", *options, "--json", str(tmp_path / "h.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    found = json.loads((tmp_path / "h.json").read_text())
    assert (found["ranks"], found["rows"], found["context"]) == (2, 8, 100)
    assert found["device"] == "replaced by constants"
    parts = found["seconds"]
    assert {"schedule", "advance", "commit", "inputs", "text and events", "step"} <= set(parts)
    assert all(seconds >= 0 for seconds in parts.values())
    assert max(seconds for name, seconds in parts.items() if name != "step") < parts["step"]
    assert found["microseconds_a_row"] == pytest.approx(parts["step"] / 16 * 1e6)
    assert found["critical_microseconds_a_row"] < found["microseconds_a_row"]
    # Pages; tokens, positions, page tables and how to sample are there.
    assert found["bytes_a_row"] <= 64

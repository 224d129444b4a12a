"""benchmarks/engine_process.py runs, and counts what comes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("tells", ["--tells-tokens", "--no-tells-tokens"])
def test_figures(tmp_path: Path, tells: str) -> None:
    options = ["--rows", "8", "--seconds", "1", tells, "--json", str(tmp_path / "e.json")]
    command = [sys.executable, "benchmarks/engine_process.py", *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    found = json.loads((tmp_path / "e.json").read_text())
    assert 0 < found["updates"] <= found["tokens"]
    assert found["tokens"] > 100 and found["steps"] > 100
    assert 0 < found["engine_processor"] < 2 and 0 < found["client_processor"] < 2

"""benchmarks/engine_process.py and benchmarks/api.py run, and count what comes."""

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
    assert 0 <= found["engine_processor"] < 2 and 0 <= found["client_processor"] < 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_figures_of_the_api(tmp_path: Path, path: str) -> None:
    options = ["--clients", "8", "--seconds", "1", "--path", path]
    command = [sys.executable, "benchmarks/api.py", *options, "--json", str(tmp_path / "a.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    found = json.loads((tmp_path / "a.json").read_text())
    assert 100 < found["streamed_events"] <= found["streamed_tokens"]
    assert found["whole_answers"] > 10 and found["whole_events"] == 0
    assert 0 <= found["streamed_core"] < 1.1 and 0 <= found["whole_core"] < 1.1

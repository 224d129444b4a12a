"""benchmarks/serve.py, with few requests: none is lost while the engine is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    found = tmp_path / "soak.json"
    options = ["--requests", "300", "--kinds", "30", "--clients", "16", "--kills", "2"]
    subprocess.run(
        [sys.executable, "benchmarks/serve.py", *options, "--json", str(found)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=600,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
    )
    told = json.loads(found.read_text())
    assert told["wrong"] == told["leaked_pages"] == 0 and told["kills"] == 2
    assert told["answered"] + told["left"] + told["refused"] == 300
    assert min(told["answered"], told["left"], told["refused"]) > 0

"""Benchmarks of a running server, with few requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a benchmark with options, and gives what it writes."""
    folder = tmp_path_factory.mktemp("benchmarks")

    def run(name: str, *options: str) -> Any:
        found = folder / f"{name}.json"
        subprocess.run(
            [sys.executable, f"benchmarks/{name}.py", *options, "--json", str(found)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=600,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        )
        return json.loads(found.read_text())

    return run


@pytest.mark.slow
def test_a_short_soak(figures: Callable[..., Any]) -> None:
    options = ["--requests", "300", "--kinds", "30", "--clients", "16", "--kills", "2"]
    told = figures("serve", *options)
    assert told["wrong"] == told["leaked_pages"] == 0 and told["kills"] == 2
    assert told["answered"] + told["left"] + told["refused"] == 300
    assert min(told["answered"], told["left"], told["refused"]) > 0


@pytest.mark.slow
def test_load(figures: Callable[..., Any]) -> None:
    """It raises where a text is another one than that of `LLM`."""
    told = figures("load", "--requests", "12", "--clients", "6", "--tokens", "8", "--rounds", "2")
    assert told.keys() == {"LLM.generate", "streamed", "whole"}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in told.values())


@pytest.mark.slow
def test_latency(figures: Callable[..., Any]) -> None:
    told = figures("latency", "--streams", "4", "--tokens", "64", "--rounds", "2")
    assert told.keys() == {"calm", "disturbed"}
    for rounds in told.values():
        assert len(rounds) == 2 and all(0 < median <= p99 for median, p99 in rounds)

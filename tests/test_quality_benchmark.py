"""benchmarks/quality.py: its figures against numpy, and a run on the bundled model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def quality() -> Any:
    spec = importlib.util.spec_from_file_location("quality", ROOT / "benchmarks" / "quality.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module
    spec.loader.exec_module(module)
    return module


def test_figures_of_logits(quality: Any) -> None:
    rng = np.random.default_rng(0)
    full = rng.normal(size=(40, 9)).astype(np.float32) * 3
    other = full + rng.normal(size=full.shape).astype(np.float32)
    following = rng.integers(0, 9, 40)
    parts = [
        quality.compare(*(jnp.asarray(a[rows]) for a in (full, other, following)))
        for rows in (slice(0, 25), slice(25, 40))
    ]
    found = quality.summary(parts)
    p, q = (np.exp(a.astype(np.float64)) for a in (full, other))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    divergence = (p * np.log(p / q)).sum(-1)
    assert found["positions"] == 40
    assert found["divergence"] == pytest.approx(divergence.mean(), rel=1e-5)
    assert found["divergence_99"] == pytest.approx(np.quantile(divergence, 0.99), rel=1e-5)
    assert 0 < found["same"] == (full.argmax(-1) == other.argmax(-1)).mean() < 1
    for name, of in (("perplexity_full", p), ("perplexity", q)):
        each = of[np.arange(40), following]
        assert found[name] == pytest.approx(np.exp(-np.log(each).mean()), rel=1e-5)
    same = quality.summary([quality.compare(full, full, following)])
    assert same["divergence"] == pytest.approx(0, abs=1e-7) and same["same"] == 1


def test_windows(quality: Any) -> None:
    """Each has the token that follows it; all positions are there, once."""
    assert list(quality.windows_of(range(10), 4, 9)) == [
        [0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="positions is 10: expected 1 to 9, what the text has"):
        list(quality.windows_of(range(10), 4, 10))


def test_what_does_not_quantise_is_refused(quality: Any) -> None:
    with pytest.raises(ValueError, match="--quantize 'int3': expected some of"):
        quality.subjects_of(quality.Arguments(Path("."), quantize="int8,int3"))
    with pytest.raises(ValueError, match="--cache-dtypes 'bfloat16': expected some of"):
        quality.subjects_of(quality.Arguments(Path("."), cache_dtypes="int8,bfloat16"))


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    options = ["--model", "examples/kjv-moe", "--positions", "96", "--window", "64"]
    options += ["--cache-dtypes", "int8"]
    command = [sys.executable, "benchmarks/quality.py", *options, "--scanned"]
    subprocess.run(
        [*command, "--json", str(tmp_path / "q.json")],
        cwd=ROOT, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    found = json.loads((tmp_path / "q.json").read_text())["subjects"]
    of_cache = found.pop("cache in int8")
    assert of_cache["weight_bytes"] == of_cache["full_bytes"]
    assert 0 < of_cache["divergence"] < of_cache["divergence_99"]
    assert set(found) == {"--quantize int8", "--quantize fp8"}
    for of in found.values():
        assert of["positions"] == 96 and 8 < of["bits"] < 9
        assert of["weight_bytes"] < 0.5 * of["full_bytes"]
        assert 0 < of["divergence"] < of["divergence_99"]
    assert found["--quantize int8"]["divergence"] < found["--quantize fp8"]["divergence"]

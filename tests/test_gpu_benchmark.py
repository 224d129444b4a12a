"""The GPU benchmark, end to end on CPU: that it runs, not what it measures."""

from __future__ import annotations

import importlib
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tyro
from rich.console import Console

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # restored, whatever it sets
    return importlib.import_module("gpu")


def arguments(gpu: Any, *words: object) -> Any:
    return tyro.cli(gpu.Arguments, args=["--no-progress", *map(str, words)])


@pytest.mark.slow
def test_all_parts_run(gpu: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "new" / "gpu.json"
    words = ("--platform", "cpu", "--quick", "--skip", "transformers", "--json", file)
    with jax.numpy_dtype_promotion("standard"):  # Flax relies on it in bfloat16
        assert gpu.main(arguments(gpu, *words)) == 0
    result = json.loads(file.read_text())
    assert result["is_measurement"] is False
    assert "no measurement" in capsys.readouterr().out
    parts = result["parts"]
    assert list(parts) == ["rates", "attention", "experts", "others", "decode", "transformers"]
    assert parts.pop("transformers") == {"skipped": "--skip"}
    for part in parts.values():
        numbers = [v for row in part["rows"] for v in row.values() if isinstance(v, float)]
        assert numbers
        assert all(math.isfinite(n) for n in numbers)
    for part in ("attention", "experts", "others"):
        assert all(row["error"] <= gpu.TOLERANCE for row in parts[part]["rows"])
    assert [row["USE_TBO"] for row in parts["decode"]["rows"]] == [0, 1]
    # What is there is kept, and what failed is done again.
    result["parts"]["decode"] = {"failed": "no luck"}
    result["parts"]["rates"]["rows"][0]["GB/s"] = 12.5
    file.write_text(json.dumps(result))
    skip = ("--skip", "transformers", "decode")
    with jax.numpy_dtype_promotion("standard"):
        assert gpu.main(arguments(gpu, *words[:3], *skip, "--json", file, "--resume")) == 0
    again = json.loads(file.read_text())["parts"]
    assert again["rates"]["rows"][0]["GB/s"] == 12.5
    assert again["others"] == result["parts"]["others"]
    assert again["decode"] == {"skipped": "--skip"}
    file.write_text(json.dumps(result | {"card": "another"}))
    assert gpu.main(arguments(gpu, *words, "--resume")) == 2
    assert "is of card 'another'" in capsys.readouterr().err


def make_bench(gpu: Any, *words: object, minutes: float = 1, device: Any = None) -> Any:
    args = arguments(gpu, *words)
    deadline = time.monotonic() + 60 * minutes
    return gpu.Bench(args, device or jax.devices()[0], gpu.read_shape("qwen3-30b-a3b"), deadline)


def test_a_part_that_fails_is_reported(gpu: Any, monkeypatch: Any) -> None:
    def broken(bench: Any) -> Any:
        raise RuntimeError("no luck\nat all")

    monkeypatch.setitem(gpu.PARTS, "rates", broken)
    found = gpu.run_part(make_bench(gpu), "rates")
    assert found == {"failed": "RuntimeError: no luck"}
    gpu.show(Console(), "rates", found)


def test_no_part_begins_when_the_time_is_over(gpu: Any) -> None:
    found = gpu.run_part(make_bench(gpu, "--minutes", 0, minutes=0), "decode")
    assert found == {"skipped": "out of time: --minutes 0"}


def test_a_kernel_that_is_wrong_is_not_timed(gpu: Any) -> None:
    right = np.array([1.0, -2.0])
    assert gpu.check(right, right + 0.01) == pytest.approx(0.005, rel=0.01)
    for wrong in (right + 0.1, right * np.nan):
        with pytest.raises(AssertionError, match="differs from XLA"):
            gpu.check(wrong, right)


def test_cpu_is_for_checks_only(gpu: Any, capsys: Any) -> None:
    assert gpu.main(arguments(gpu, "--platform", "cpu")) == 2
    assert "give --quick" in capsys.readouterr().err


def test_without_a_gpu(gpu: Any, capsys: Any) -> None:
    assert gpu.main(arguments(gpu)) == 2
    assert "nothing was run: Unknown backend: 'gpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "words", "expected"),
    [
        (0, ("--layers", 7), (7, "as asked")),
        (0, ("--quick",), (4, "--quick")),
        (42, (), (10, "memory")),  # GiB; a layer takes 1.2 with 2.0 for 256 rows of 4,096 tokens
        (300, (), (48, "all")),
    ],
)
def test_layers_by_memory(
    gpu: Any, monkeypatch: Any, memory: int, words: tuple[object, ...], expected: tuple[int, str]
) -> None:
    stats = {"bytes_limit": memory * 2**30, "bytes_in_use": 0}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(gpu, "make_runner", lambda *_: SimpleNamespace(compile=lambda *_: None))
    assert gpu.choose_layers(make_bench(gpu, *words, device=device), 256, 4096, 5) == expected


def test_without_memory_for_a_layer(gpu: Any) -> None:
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 2**30})
    with pytest.raises(gpu.Skipped, match="hold no layer"):
        gpu.choose_layers(make_bench(gpu, device=device), 256, 4096, 5)


def test_bytes_of_a_step(gpu: Any) -> None:
    config = gpu.read_shape("qwen3-30b-a3b", 1)
    model = gpu.abstract_model(config, False)
    attention = 2048 * 128 * (32 + 4 + 4 + 32) + 2 * 128
    others = attention + 2048 * 128 + 3 * 2048 + 151936 * 2048  # router, norms, vocabulary
    expert, keys = 3 * 2048 * 768, 2 * 4 * 128
    for rows, touched in ((1, 8), (2, 8 + 8 * 15 / 16)):
        expected = 2 * (others + touched * expert + rows * (100 * keys + 2048))
        assert gpu.bytes_of_step(config, model, rows, 100) == pytest.approx(expected, rel=1e-12)

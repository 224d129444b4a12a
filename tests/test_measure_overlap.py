"""examples/measure_overlap.py on CPU devices: that it runs and says what it found, not its times."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tyro
from flax import nnx
from jax.sharding import NamedSharding

from tbo_jax.checkpoint.random_weights import random_model
from tbo_jax.parallel.sharding import make_mesh, parameter_spec
from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.measured import text_path
from tbo_jax.schedule.model_step import StepShape

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def script(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("measure_overlap")


def arguments(script: Any, *words: object) -> Any:
    return tyro.cli(script.Arguments, args=[str(word) for word in words])


def run(script: Any, *words: object) -> int:
    with jax.numpy_dtype_promotion("standard"):  # Flax relies on it in bfloat16
        return script.main([str(word) for word in words], "measure_overlap.py")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_it_runs(script: Any, tmp_path: Path, capsys: Any, phase: str) -> None:
    file, folder = tmp_path / "overlap.json", tmp_path / "profile"
    status = run(
        script, "--cpu", "--quiet", "--devices", 2, "--layers", 2, "--steps", 3, "--warmup", 1,
        "--phase", phase, "--json", file, "--profile", folder,
    )  # fmt: skip
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "measures nothing" in printed.out and "USE_TBO=1" in printed.out
    found = json.loads(file.read_text())
    assert found["schema"] == script.SCHEMA and found["is_measurement"] is False
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"] == {"platform": "cpu", "kind": "cpu", "number": 2}
    setting = found["setting"]
    assert (setting["phase"], setting["layers"], setting["tokens"]) == (phase, 2, 16)
    assert found["target"] is None and found["modelled"] == []
    assert [one["micro_batches"] for one in found["timed"]] == [1, 2]
    for one in found["timed"]:
        assert len(one["steps"]) == 3 and one["step"] == statistics.median(one["steps"]) > 0
    off, on = found["timed"]
    assert found["speed_up"] == pytest.approx(off["step"] / on["step"])
    assert [one["micro_batches"] for one in found["measured"]] == [1, 2]
    for one in found["measured"]:
        assert one["hidden"] + one["exposed"] == pytest.approx(one["communication"])
        assert 0 < one["communication"] < one["step"] and one["compute"] > 0
        assert [d["executions"] for d in one["devices"]] == [script.PROFILED] * 2
        assert one["matched"] > 0.9
        scopes = {c["scope"] for c in one["collectives"]}
        assert scopes == {
            f"layer_{layer}/micro_batch_{number}/{stage}"
            for layer in range(2)
            for number in range(one["micro_batches"])
            for stage in ("dispatch", "combine")
        }
        text = text_path(folder, one["micro_batches"]).read_text()
        assert parse(text).name == one["module"]
    for secret in (str(tmp_path), str(Path.home()), str(EXAMPLES.parent), ".py"):
        assert secret not in file.read_text()


@pytest.mark.parametrize(
    ("kind", "number", "places", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 8, None, "h100x8"),
        ("NVIDIA H200", 2, None, "h200x2"),
        ("NVIDIA H100 80GB HBM3", 16, None, None),
        ("NVIDIA GeForce", 2, None, None),
        ("TPU v5 lite", 8, (2, 4, 1), "v5e:2x4"),
        ("TPU v5", 8, (2, 2, 2), "v5p:2x2x2"),
        ("TPU7x", 8, (2, 2, 1), "tpu7x:2x2x1"),
        ("TPU v5 lite", 7, (2, 4, 1), None),
        ("cpu", 2, None, None),
    ],
)
def test_the_machine_is_known_by_its_devices(
    script: Any, kind: str, number: int, places: tuple[int, ...] | None, name: str | None
) -> None:
    devices = [SimpleNamespace(device_kind=kind) for _ in range(number)]
    if places is not None:
        every = list(np.ndindex(places)) * 2  # two devices in a place, where a chip is two
        for device, place in zip(devices, every):
            device.coords = place
    assert script.guess_target(devices) == name


@pytest.mark.parametrize(
    ("shape", "lengths", "contexts"),
    [
        (StepShape("decode", 3, 130), [1, 1, 1], [129, 129, 129]),
        (StepShape("prefill", 10, 4), [4, 4, 2], [0, 0, 0]),
    ],
)
def test_the_batch_fills_the_step(
    script: Any, shape: StepShape, lengths: list[int], contexts: list[int]
) -> None:
    batch = script.full_batch(shape, SimpleNamespace(vocab_size=100), 2)
    assert batch.token_ids.shape == (2, shape.tokens)
    assert batch.context_lens[0].tolist() == contexts
    assert batch.query_lens[0].tolist() == lengths
    assert not np.array_equal(batch.token_ids[0], batch.token_ids[1])
    used = batch.page_table[batch.page_table > 0]
    assert used.max() < shape.cache.num_pages


def test_weights_are_made_where_they_stay(script: Any) -> None:
    config, _ = script.step_of(arguments(script, "--cpu", "--layers", 1))
    mesh = make_mesh(2)
    model = random_model(config, mesh)
    sharded = 0
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        spec = parameter_spec(path, variable, mesh)
        value = variable[...]
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim), path
        assert bool((value == 1).all()) == (value.ndim == 1) and bool((value != 0).any()), path
        sharded += not value.is_fully_replicated
    assert sharded >= 2  # the experts of the layer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no GPU and no TPU here .*--xla_force_host_platform_device_count=2 python .* --cpu"),
        (("--cpu", "--devices", 1), r"1 of 8 device\(s\): expected 2 or more"),
        (("--cpu", "--devices", 9), r"9 of 8 device\(s\): expected 2 or more"),
        (("--cpu", "--steps", 0), "--steps 0: expected at least 1"),
        (("--cpu", "--config", "nonesuch"), "no model 'nonesuch'"),
        (("--cpu", "--target", "h900x8"), "unknown target 'h900x8'"),
        (("--cpu", "--tokens", 1), "1 tokens do not divide into 2 micro-batches"),
        (("--cpu", "--json", "/nowhere/x.json"), "--json /nowhere/x.json: /nowhere is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    script: Any, capfd: Any, words: tuple[object, ...], message: str
) -> None:
    assert run(script, *words) == 2
    err = " ".join(capfd.readouterr().err.split())
    assert re.search(message, err), err


def test_a_path_to_a_model_is_not_told(script: Any) -> None:
    args = arguments(script, "--config", "/home/somebody/secret/config.json")
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    shape = StepShape("decode", 4, 8)
    values = script.as_json(args, [device] * 8, shape, "h100x8", {1: [3.0], 2: [2.0]}, {}, {})
    assert values["setting"]["config"] == "a file" and "somebody" not in json.dumps(values)
    assert values["is_measurement"] is True and values["speed_up"] == 1.5

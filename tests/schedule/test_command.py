"""The command line: names, errors, and the files that it writes (without compiling)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tbo_jax.attention import gpu_paged
from tbo_jax.schedule.__main__ import Arguments, as_json, counts_of, setting_of, write_files
from tbo_jax.schedule.compare import SCHEMA
from tbo_jax.schedule.model_step import (
    Phase,
    StepShape,
    abstract_model,
    attention_work,
    expected_costs,
    inspect_model,
    list_presets,
    read_shape,
)
from tbo_jax.schedule.targets import find_target
from tests.schedule.test_report import of_fixture

ROOT = Path(__file__).parents[2]


def test_counts() -> None:
    assert counts_of("1,2") == [1, 2]
    assert counts_of("2") == [2]
    assert counts_of("2,2,3") == [2, 3]


@pytest.mark.parametrize("text", ["", "0,1", "two", "1;2", "-1"])
def test_bad_counts_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"--micro-batches '{text}': expected"):
        counts_of(text)


@pytest.mark.parametrize(("phase", "reach"), [("decode", 128), ("prefill", 256)])
def test_layers_with_a_window_read_less(phase: Phase, reach: int) -> None:
    config = read_shape("gpt-oss-120b", 4)  # two with a window of 128
    whole = dataclasses.replace(config, sliding_window=None)
    long, mean = StepShape(phase, 256, 4096), StepShape(phase, 256, (4096 + reach) // 2)
    found = attention_work(config, 256, long)[gpu_paged.NAME]
    assert found == attention_work(whole, 256, mean)[gpu_paged.NAME]
    assert found.flops < attention_work(whole, 256, long)[gpu_paged.NAME].flops


@pytest.mark.parametrize("name", list_presets())
def test_public_shapes_are_understood(name: str) -> None:
    config = read_shape(name)
    assert config.num_layers > 20
    assert abstract_model(read_shape(name, 1), scanned=False).config.num_layers == 1
    if config.num_experts:
        assert config.num_experts % 8 == 0


def test_shapes_from_files(tmp_path: Path) -> None:
    bundled = Path(__file__).parents[2] / "examples" / "kjv-moe"
    assert read_shape(str(bundled)) == read_shape(str(bundled / "config.json"))
    with pytest.raises(ValueError, match=r"no model 'nonesuch': .*qwen3-30b-a3b"):
        read_shape("nonesuch")
    with pytest.raises(ValueError, match=r"layers must be 1 to 48 .* got 49"):
        read_shape("qwen3-30b-a3b", 49)
    broken = tmp_path / "config.json"
    for content, message in {
        b"{": "not valid JSON: ",
        b"[]": "expected a JSON object, got list",
        b'{"model_type": "\xff"}': "not valid JSON: .* can't decode",
        b"[" * 100_000: "not valid JSON: nested too deeply",
        b'{"head_dim": 8, "head_dim": 16}': "not valid JSON: key 'head_dim' occurs 2 times",
    }.items():
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=f"config.json: {message}") as error:
            read_shape(str(tmp_path))
        assert type(error.value) is ValueError


def test_buckets_and_caches_hold_the_step() -> None:
    decode = StepShape("decode", 256, 4096)
    assert decode.bucket.decode and decode.bucket.sequences == 256
    assert decode.cache.num_pages == 256 * 64 + 1
    prefill = StepShape("prefill", 8192, 3000)
    assert prefill.bucket.sequences == 3
    assert prefill.cache.pages_per_sequence == 47


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        (StepShape("decode", 0, 64), 1, "tokens must be at least 1, got 0"),
        (StepShape("decode", 4, 0), 1, "context must be at least 1, got 0"),
        (StepShape("decode", 4, 64), 5, "4 tokens do not divide into 5 micro-batches"),
        (StepShape("prefill", 4, 64, remat=True), 1, "remat is for training: prefill has no"),
        (
            StepShape("train", 192, 64),
            2,
            r"192 tokens .* 2 micro-batch\(es\) .* multiple of 2 x 64",
        ),
    ],
)
def test_bad_steps_are_refused(shape: StepShape, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect_model(
            read_shape("qwen3-30b-a3b", 1), find_target("h100x8"), shape, micro_batches=count
        )


def test_expectations_are_those_of_an_even_routing() -> None:
    config = read_shape("qwen3-30b-a3b")
    shape = StepShape("decode", 256, 4096)
    costs = expected_costs(config, 8, shape)
    turns, work = costs["trip_counts"], costs["kernels"]
    assert turns["key_blocks"] == 64
    # 256 x 8 tokens with 8 of 128 experts each: 128 rows an expert, 16 experts a device.
    assert turns["expert_blocks_64"] == 2 * 16
    read = 2 * 256 * 4096 * 4 * 128 * 2
    assert work["tbo_paged_attention"].bytes == pytest.approx(read, rel=0.01)
    products = 2 * 256 * 8 * 3 * 2048 * 768
    assert work["tbo_experts_gate_up"].flops + work["tbo_experts_down"].flops == products


def test_expectations_of_latent_attention() -> None:
    config = read_shape("deepseek-v3", 1)
    work = attention_work(config, 256, StepShape("decode", 256, 4096))["tbo_paged_attention"]
    assert work.bytes == 2 * (256 * 4096 * 576 + 256 * 128 * (576 + 512))
    assert work.flops == 2 * 256 * 4096 * 128 * (576 + 512)


@pytest.mark.parametrize(("layers", "dense"), [(61, {0, 1, 2}), (60, {0, 1}), (2, set())])
def test_a_shortened_shape_has_the_last_layers(layers: int, dense: set[int]) -> None:
    config = read_shape("deepseek-v3", layers)
    assert (config.num_layers, config.dense_layers) == (layers, dense)


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reports = [of_fixture("gpu_unrolled")]
    args = Arguments(
        json=tmp_path / "r.json", trace=tmp_path / "t.json", plot=tmp_path / "p.svg",
        dump_hlo=tmp_path / "hlo",
    )  # fmt: skip
    target = find_target("h100x8")
    values = as_json("title", setting_of(args, target, 2), target, reports)
    write_files(args, "title", values, target, reports)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["reports"][0]["micro_batches"] == 2
    assert written["schema"] == SCHEMA
    setting = written["setting"]
    assert setting["phase"] == "decode" and setting["transport"] == "all_to_all"
    assert setting["target"] == "h100x8" and setting["layers"] == 2
    assert written["versions"]["jax"] == jax.__version__
    assert 300e9 < written["rates"]["links"]["bandwidth"] < 450e9
    described = (ROOT / "docs" / "schedule.md").read_text()
    for name in (*written, *written["reports"][0], *written["reports"][0]["collectives"][0]):
        assert f"`{name}`" in described, f"docs/schedule.md does not say what {name} is"
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "modelled" in (tmp_path / "p.svg").read_text()
    assert (tmp_path / "hlo" / "decode_256_x2_unrolled.hlo").read_text() == reports[0].hlo


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tbo_jax.schedule", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_list_of_targets() -> None:
    done = run("--list-targets")
    assert done.returncode == 0
    for name in ("h100x1..8", "v5e:2x4", "qwen3-30b-a3b"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "h900x8"], "unknown target 'h900x8'"),
        (["--config", "nonesuch"], "no model 'nonesuch'"),
        (["--plot", "picture.bmp"], "picture.bmp"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr

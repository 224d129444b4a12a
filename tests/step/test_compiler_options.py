from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tbo_jax.step import compiler_options as module
from tbo_jax.step.compiler_options import compiler_options


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._collectives_first.cache_clear()
    return tmp_path


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_cpu_and_single_devices_get_none(micro_batches: int) -> None:
    assert compiler_options("cpu", 8, micro_batches) == {}
    assert compiler_options("gpu", 1, micro_batches) == {}
    assert compiler_options("tpu", 1, micro_batches) == {}


def test_gpu_gets_the_latency_hiding_scheduler() -> None:
    for platform in ("gpu", "cuda"):
        assert compiler_options(platform, 8, 1) == {"xla_gpu_enable_latency_hiding_scheduler": True}


def test_several_micro_batches_get_a_profile_of_all_collectives(own_cache: Path) -> None:
    options = compiler_options("gpu", 8, 2)
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"]))
    assert profile.is_relative_to(own_cache)
    lines = profile.read_text().splitlines()
    for name in ("all-to-all-start", "all-to-all-start.7", "ragged-all-to-all-start.376"):
        assert f'costs {{ name: "{name}" cost_us: 1000000 }}' in lines
    assert len(lines) == len(set(lines))


def test_the_ragged_transport_sends_counts_beside_the_payload(own_cache: Path) -> None:
    options = compiler_options("gpu", 8, 2, "ragged_all_to_all")
    assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == "2"
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"])).read_text()
    assert '"ragged-all-to-all-start.376"' in profile
    assert '"all-to-all-start' not in profile
    assert set(options) - set(compiler_options("gpu", 8, 2)) == {
        "xla_gpu_experimental_parallel_collective_overlap_limit"
    }


def test_training_starts_exchanges_before_sums_of_gradients(own_cache: Path) -> None:
    options = compiler_options("gpu", 8, 2, training=True)
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"])).read_text()
    assert '"all-to-all-start.7"' in profile
    assert '"all-reduce-start' not in profile
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] != "0"


def test_the_profile_is_written_once(own_cache: Path) -> None:
    first = compiler_options("gpu", 8, 2)
    profile = own_cache / "tbo_jax" / "collectives_first.pbtxt"
    before = profile.stat().st_mtime_ns
    module._collectives_first.cache_clear()  # as another process would
    assert compiler_options("gpu", 4, 3) == first
    assert profile.stat().st_mtime_ns == before
    profile.write_text("damaged")
    module._collectives_first.cache_clear()
    compiler_options("gpu", 8, 2)
    assert "all-to-all-start" in profile.read_text()


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    own_cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(
        module.atexit,
        "register",
        lambda *args, **options: at_exit.append(partial(*args, **options)),
    )
    (own_cache / "tbo_jax").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        options = compiler_options("gpu", 8, 2)
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"]))
    assert profile.is_file()
    assert "no profile in" in caplog.text
    for call in at_exit:
        call()
    assert not profile.parent.exists()


def test_tpu_gets_asynchronous_collectives() -> None:
    options = compiler_options("tpu", 8, 2)
    assert options["xla_tpu_enable_async_all_to_all"] == "true"
    options.clear()  # the caller's own
    assert compiler_options("tpu", 8, 2)

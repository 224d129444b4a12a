from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.step import compiler_options as module
from tbo_jax.step.compiler_options import compiler_options, overlap_options, process_options


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._collectives_first.cache_clear()
    return tmp_path


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_cpu_and_single_devices_get_none(micro_batches: int) -> None:
    assert overlap_options("cpu", 8, Strategy(micro_batches)) == {}
    assert overlap_options("gpu", 1, Strategy(micro_batches)) == {}
    assert overlap_options("tpu", 1, Strategy(micro_batches)) == {}


def test_gpu_gets_the_latency_hiding_scheduler() -> None:
    for platform in ("gpu", "cuda"):
        assert overlap_options(platform, 8, Strategy()) == {
            "xla_gpu_enable_latency_hiding_scheduler": True
        }


def test_several_micro_batches_get_a_profile_of_all_collectives(own_cache: Path) -> None:
    options = overlap_options("gpu", 8, Strategy(2))
    assert overlap_options("gpu", 8, Strategy(expert_chunks=2)) == options
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"]))
    assert profile.is_relative_to(own_cache)
    lines = profile.read_text().splitlines()
    for name in ("all-to-all-start", "all-to-all-start.7", "ragged-all-to-all-start.376"):
        assert f'costs {{ name: "{name}" cost_us: 1000000 }}' in lines
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_ragged_transport_has_one_collective_on_its_way(micro_batches: int) -> None:
    options = overlap_options("gpu", 8, Strategy(micro_batches), "ragged_all_to_all")
    assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == "1"


def test_the_profile_of_the_ragged_transport_leaves_out_its_sizes(own_cache: Path) -> None:
    options = overlap_options("gpu", 8, Strategy(2), "ragged_all_to_all")
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"])).read_text()
    assert '"ragged-all-to-all-start.376"' in profile
    assert '"all-to-all-start' not in profile
    assert set(options) - set(overlap_options("gpu", 8, Strategy(2))) == {
        "xla_gpu_experimental_parallel_collective_overlap_limit"
    }


def test_training_starts_exchanges_before_sums_of_gradients(own_cache: Path) -> None:
    options = overlap_options("gpu", 8, Strategy(2), training=True)
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"])).read_text()
    assert '"all-to-all-start.7"' in profile
    assert '"all-reduce-start' not in profile
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] != "0"


def test_the_profile_is_written_once(own_cache: Path) -> None:
    first = overlap_options("gpu", 8, Strategy(2))
    profile = own_cache / "tbo_jax" / "collectives_first.pbtxt"
    before = profile.stat().st_mtime_ns
    module._collectives_first.cache_clear()  # as another process would
    assert overlap_options("gpu", 4, Strategy(3)) == first
    assert profile.stat().st_mtime_ns == before
    profile.write_text("damaged")
    module._collectives_first.cache_clear()
    overlap_options("gpu", 8, Strategy(2))
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
        options = overlap_options("gpu", 8, Strategy(2))
    profile = Path(str(options["xla_gpu_pgle_profile_file_or_directory_path"]))
    assert profile.is_file()
    assert "no profile in" in caplog.text
    for call in at_exit:
        call()
    assert not profile.parent.exists()


def test_tpu_gets_asynchronous_collectives() -> None:
    options = overlap_options("tpu", 8, Strategy(2))
    assert options["xla_tpu_enable_async_all_to_all"] == "true"
    options.clear()  # the caller's own
    assert overlap_options("tpu", 8, Strategy(2))


def test_an_option_that_is_not_known_is_left_out_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = {"xla_gpu_enable_latency_hiding_scheduler": True}  # by XLA:CPU's parser too
    asked = known | {"xla_gpu_renamed": True, "xla_gpu_gone": "2"}
    mesh = make_mesh(2)
    for _ in range(2):
        assert module.known_options(asked, mesh) == known
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "has no option xla_gpu_renamed" in said[0] and "has no option xla_gpu_gone" in said[1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_autotune_level"):
        module.known_options({"xla_gpu_autotune_level": "high"}, mesh)


def mesh_of(platform: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As far as options look at one, of 4 devices; they are all taken for known."""
    monkeypatch.setattr(module, "known_options", lambda options, mesh: options)
    devices = [SimpleNamespace(platform=platform, process_index=i % processes) for i in range(4)]
    return SimpleNamespace(devices=np.array(devices), size=4)


@pytest.mark.parametrize("platform", ["gpu", "cuda", "tpu", "cpu"])
@pytest.mark.parametrize("processes", [1, 2])
def test_several_gpu_processes_share_no_autotuning(
    platform: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of(platform, processes, monkeypatch)
    alone = {"xla_gpu_shard_autotuning": False}
    wanted = alone if processes > 1 and platform in ("gpu", "cuda") else {}
    assert process_options(mesh) == wanted
    assert compiler_options(mesh, Strategy()) == overlap_options(platform, 4, Strategy()) | wanted

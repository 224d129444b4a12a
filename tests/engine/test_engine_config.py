"""An engine's options, refused where no model and no machine could have them."""

from __future__ import annotations

import dataclasses
import os
import stat
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro

from tbo_jax import LLM, EngineConfig
from tbo_jax.engine import devices
from tbo_jax.engine.cache_size import cache_config
from tbo_jax.engine.scheduling.limits import Limits
from tbo_jax.host import folders
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.schedule.model_step import read_shape


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("devices", 0, "devices must be at least 1, got 0"),
        ("devices", True, "devices must be an integer from [0-9], got True"),
        ("tensor_parallel", 1.0, r"tensor_parallel must be an integer from [0-9], got 1\.0"),
        ("max_context", 1, "max_context must be at least 2, got 1"),
        ("num_pages", 1, "num_pages must be at least 2, got 1"),
        ("page_size", "16", "page_size must be an integer from [0-9], got '16'"),
        ("max_sequences", -3, "max_sequences must be at least 1, got -3"),
        ("max_batched_tokens", 15, "max_batched_tokens is 15: expected at least max_sequences, 16"),
        ("speculate", -1, "speculate must be at least 0, got -1"),
        ("dtype", "float16", "dtype is 'float16': expected one of None, 'bfloat16', 'float32'"),
        ("transport", "mail", "transport is 'mail': expected one of 'all_to_all', "),
        ("dispatch_dtype", "int4", "dispatch_dtype is 'int4': expected one of None, 'float8"),
        ("look_ahead", 1, "look_ahead is 1: expected one of None, True, False"),
        ("scanned", "no", "scanned is 'no': expected one of True, False"),
        ("deterministic", 1, "deterministic is 1: expected one of True, False"),
        ("overlap", "auto", "overlap is 'auto': expected an OverlapConfig or None"),
    ],
)
def test_values_that_cannot_be(option, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{option: value})


def test_integers_of_numpy_are_taken():
    assert EngineConfig(max_sequences=np.int64(4)) == EngineConfig(max_sequences=4)


def test_speculation_is_not_deterministic():
    with pytest.raises(ValueError, match="deterministic=True with speculate=2: expected one of"):
        EngineConfig(speculate=2, deterministic=True)


def test_more_drafts_than_a_step_has_tokens():
    with pytest.raises(
        ValueError, match="speculate is 32: expected less than max_batched_tokens, 32"
    ):
        EngineConfig(max_batched_tokens=32, speculate=32)


def test_options_beside_a_config():
    with pytest.raises(TypeError, match=r"config is \{'devices': 1\}: expected an EngineConfig"):
        LLM("absent", {"devices": 1})
    with pytest.raises(TypeError, match="expected a config or options, got both"):
        LLM("absent", EngineConfig(), devices=2)
    with pytest.raises(TypeError, match="'device'"):
        LLM("absent", device=2)
    with pytest.raises(TypeError, match="max_tokens is 16: expected max_batched_tokens, as"):
        LLM("absent", devices=2, max_tokens=16)


def test_every_option_is_explained(capsys):
    """Command lines print what stands under a field."""
    with pytest.raises(SystemExit):
        tyro.cli(EngineConfig, args=["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(EngineConfig):
        assert (f"--{field.name.replace('_', '-')}" in text) == (
            field.name not in ("overlap", "prompt_logprobs")  # others' options say it
        )


def test_more_cpu_devices_than_anybody_has_are_not_made(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: made.append(value))
    with pytest.raises(
        ValueError, match="999999 devices were asked for, 8 exist on platform 'cpu'"
    ):
        devices.find_devices(999999)
    assert made == [devices.MOST_CPU_DEVICES]


def test_cpu_devices_that_the_program_around_has_asked_for_stay(monkeypatch):
    made: list[int] = []
    assert jax.config.jax_num_cpu_devices == 8  # conftest.py
    monkeypatch.setattr(jax.config, "update", lambda name, value: made.append(value))
    assert len(devices.find_devices(2)) == 2 and not made


@pytest.mark.parametrize(
    ("slices", "order", "nodes"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3], 1),  # a process for each GPU of one host
        ([0, 1, 0, 1], [0, 2, 1, 3], 2),  # hosts take turns in the numbers of the processes
        ([None] * 4, [0, 1, 2, 3], 4),  # CPU
    ],
)
def test_devices_of_a_host_are_a_node(monkeypatch, slices, order, nodes):
    found = [
        SimpleNamespace(id=i, process_index=i, **({} if s is None else {"slice_index": s}))
        for i, s in enumerate(slices)
    ]
    monkeypatch.setattr(devices, "find_devices", lambda count: found)
    monkeypatch.setattr(devices, "make_mesh", lambda count, chosen, **sizes: (chosen, sizes))
    chosen, sizes = devices.make_devices(None, 1)
    assert [device.id for device in chosen] == order
    assert sizes == {"tensor": 1, "nodes": nodes}


def test_a_cache_of_one_token_is_refused_by_what_was_given():
    config = EngineConfig(num_pages=2, page_size=1)
    decoder, mesh = read_shape("qwen3-30b-a3b", 1), make_mesh(1)
    with pytest.raises(ValueError, match=r"num_pages 2 with page_size 1: .* holds 1 token\(s\)"):
        cache_config(config, decoder, mesh, 8)
    _, longest = cache_config(EngineConfig(num_pages=3, page_size=1), decoder, mesh, 8)
    assert longest == 2


@pytest.mark.parametrize("max_sequences", [1, 2, 3, EngineConfig.max_sequences])
def test_a_step_has_room_for_every_row_of_a_small_cache(max_sequences):
    """The default has more rows than so small a cache has tokens: they wait."""
    config = EngineConfig(num_pages=3, page_size=1, max_sequences=max_sequences)
    cache, longest = cache_config(config, read_shape("qwen3-30b-a3b", 1), make_mesh(1), 8)
    assert cache.max_tokens == max(2, max_sequences)
    Limits(cache.page_size, cache.num_pages, max_sequences, cache.max_tokens, longest)


@pytest.fixture
def no_home(monkeypatch, tmp_path):
    """Where the cache folder of a user without home is expected; the temporary files are empty."""

    def nobody(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(folders.Path, "expanduser", nobody)
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"tbo_jax-{os.getuid()}"


def test_cache_folder_of_a_user_with_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders.cache_folder() == tmp_path / "tbo_jax"


def test_cache_folder_of_a_user_without_home(no_home):
    assert folders.cache_folder() == no_home
    assert stat.S_IMODE(no_home.stat().st_mode) == 0o700
    folders._own_folder.cache_clear()  # as another process would
    assert folders.cache_folder() == no_home


@pytest.mark.parametrize("kind", ["another's", "writable", "link", "file"])
def test_a_cache_folder_that_somebody_else_can_write_is_not_used(no_home, monkeypatch, kind):
    if kind == "file":
        no_home.touch()
    elif kind == "link":
        (no_home.parent / "elsewhere").mkdir()
        no_home.symlink_to(no_home.parent / "elsewhere")
    else:
        no_home.mkdir()
        no_home.chmod(0o777 if kind == "writable" else 0o700)
    if kind == "another's":
        user = os.getuid() + 1
        monkeypatch.setattr(folders.os, "getuid", lambda: user)
        no_home.rename(no_home.parent / f"tbo_jax-{user}")
    folder = folders.cache_folder()
    assert folder == folders.cache_folder()  # one for the process
    assert folder.name not in (no_home.name, f"tbo_jax-{os.getuid()}")
    assert folder.parent == no_home.parent and stat.S_IMODE(folder.stat().st_mode) == 0o700

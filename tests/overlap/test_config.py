from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tbo_jax import Bucket, CacheConfig, OverlapConfig
from tbo_jax.overlap.config import Strategy


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, "off"),
        ({"USE_TBO": ""}, "off"),
        ({"USE_TBO": "0"}, "off"),
        ({"USE_TBO": "1"}, "on"),
        ({"USE_TBO": "auto"}, "auto"),
    ],
)
def test_use_tbo_is_read(environ: dict[str, str], mode: str) -> None:
    config = OverlapConfig.from_env(environ)
    assert config == OverlapConfig(mode)
    assert config.enabled == (mode != "off")


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_TBO", "1")
    assert OverlapConfig.from_env().enabled
    monkeypatch.delenv("USE_TBO")
    assert not OverlapConfig.from_env().enabled


@pytest.mark.parametrize("value", ["maybe", "2", "-1", "true", " 1", "01", "Auto"])
def test_another_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(
        ValueError, match=f"USE_TBO={value} .*expected 0, 1, auto, micro_batches or expert_chunks"
    ):
        OverlapConfig.from_env({"USE_TBO": value})


@pytest.mark.parametrize("mode", [True, False, None, "1", "ON", ["on"]])
def test_another_mode_is_refused(mode: object) -> None:
    message = f"mode must be 'off', 'on' or 'auto', got {mode!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        OverlapConfig(mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 0, -2])
def test_fewer_than_two_micro_batches_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_micro_batches must be at least 2, got {count}"):
        OverlapConfig("on", num_micro_batches=count)


def test_min_tokens_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at least 1, got 0"):
        OverlapConfig(min_tokens=0)


def test_small_steps_stay_whole() -> None:
    config = OverlapConfig("on", num_micro_batches=3, min_tokens=8)
    assert [config.micro_batches(tokens) for tokens in (1, 7, 8, 64)] == [1, 1, 3, 3]


def test_nothing_is_cut_when_disabled() -> None:
    assert OverlapConfig("off", num_micro_batches=3).micro_batches(1024) == 1


OFF, SPLIT, CHUNKS = Strategy(), Strategy(micro_batches=3), Strategy(expert_chunks=4)


def test_candidates_of_a_step() -> None:
    config = OverlapConfig("auto", num_micro_batches=3, min_tokens=8, num_expert_chunks=4)
    found = [config.candidates(tokens) for tokens in (1, 7, 8)]
    assert found == [(OFF,), (OFF,), (OFF, SPLIT, CHUNKS)]
    assert config.chosen(8) == OFF  # not timed
    assert config.most_micro_batches == 3
    assert OverlapConfig("on").candidates(8) == (Strategy(micro_batches=2),)
    assert OverlapConfig("off").candidates(8) == (OFF,)


def test_a_strategy_by_name() -> None:
    config = OverlapConfig("on", strategy="expert_chunks", num_expert_chunks=4)
    assert [config.chosen(tokens) for tokens in (1, 2)] == [OFF, CHUNKS]
    assert config.micro_batches(2) == config.most_micro_batches == 1
    auto = OverlapConfig("auto", strategy="expert_chunks", num_expert_chunks=4)
    assert auto.candidates(2) == (OFF, CHUNKS)
    for name in ("micro_batches", "expert_chunks"):
        read = OverlapConfig.from_env({"USE_TBO": name})
        assert (read.mode, read.chosen(2).name) == ("on", name)


def test_strategies_have_names() -> None:
    assert [str(one) for one in (OFF, SPLIT, CHUNKS)] == [
        "off", "micro_batches 3", "expert_chunks 4",
    ]  # fmt: skip
    assert [one.overlaps for one in (OFF, SPLIT, CHUNKS)] == [False, True, True]


def test_another_strategy_is_refused() -> None:
    message = "strategy must be None, 'micro_batches' or 'expert_chunks', got 'chunks'"
    with pytest.raises(ValueError, match=message):
        OverlapConfig("on", strategy="chunks")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_expert_chunks must be at least 2, got 1"):
        OverlapConfig("on", strategy="expert_chunks", num_expert_chunks=1)


@pytest.mark.parametrize("name", ["num_micro_batches", "min_tokens", "num_expert_chunks"])
@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_numbers_are_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer from [12], got {value!r}"):
        OverlapConfig(**{name: value})
    assert getattr(OverlapConfig(**{name: np.int64(2)}), name) == 2


@pytest.mark.parametrize("name", ["tokens", "sequences", "drafts"])
@pytest.mark.parametrize("value", [-1, True, 4.0, "4"])
def test_a_bucket_has_whole_sizes(name: str, value: Any) -> None:
    sizes = dict(tokens=4, sequences=4, decode=True)
    assert Bucket(**sizes | {name: np.int32(2)})
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        Bucket(**sizes | {name: value})


def test_a_bucket_without_room_or_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        Bucket(0, 4)
    with pytest.raises(ValueError, match="sequences must be at least 1, got 0"):
        Bucket(4, 0)
    with pytest.raises(ValueError, match="decode must be True or False, got 1"):
        Bucket(4, 4, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drafts must be at least 0, got -1"):
        Bucket(4, 4, True, -1)


@pytest.mark.parametrize("name", ["num_pages", "page_size", "pages_per_sequence", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8"])
def test_a_cache_has_whole_sizes(name: str, value: Any) -> None:
    sizes = dict(num_pages=9, page_size=4, pages_per_sequence=2, max_tokens=16)
    assert CacheConfig(**sizes | {name: np.int64(8)})
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        CacheConfig(**sizes | {name: value})
    with pytest.raises(ValueError, match=r"num_pages must be at least 2, got 1 \(page 0"):
        CacheConfig(**sizes | {"num_pages": 1})

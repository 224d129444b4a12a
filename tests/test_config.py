from __future__ import annotations

import pytest

from tbo_jax import OverlapConfig


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [({}, False), ({"USE_TBO": ""}, False), ({"USE_TBO": "0"}, False), ({"USE_TBO": "1"}, True)],
)
def test_use_tbo_is_read(environ: dict[str, str], enabled: bool) -> None:
    config = OverlapConfig.from_env(environ)
    assert config == OverlapConfig(enabled=enabled)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_TBO", "1")
    assert OverlapConfig.from_env().enabled
    monkeypatch.delenv("USE_TBO")
    assert not OverlapConfig.from_env().enabled


@pytest.mark.parametrize("value", ["maybe", "2", "-1", "true", " 1", "01", "auto"])
def test_another_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match=f"USE_TBO={value} .*expected 0 or 1"):
        OverlapConfig.from_env({"USE_TBO": value})


@pytest.mark.parametrize("count", [1, 0, -2])
def test_fewer_than_two_micro_batches_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_micro_batches must be at least 2, got {count}"):
        OverlapConfig(enabled=True, num_micro_batches=count)


def test_min_tokens_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at least 1, got 0"):
        OverlapConfig(min_tokens=0)


def test_small_steps_stay_whole() -> None:
    config = OverlapConfig(enabled=True, num_micro_batches=3, min_tokens=8)
    assert [config.micro_batches(tokens) for tokens in (1, 7, 8, 64)] == [1, 1, 3, 3]


def test_nothing_is_cut_when_disabled() -> None:
    assert OverlapConfig(enabled=False, num_micro_batches=3).micro_batches(1024) == 1

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import TokenizerError, default_sampling


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        (
            dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05),
            dict(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05),
        ),
        (dict(temperature=0.7), dict(temperature=0.7)),
        (dict(max_new_tokens=2048), dict(max_new_tokens=2048)),
        (dict(do_sample=True), dict(temperature=1.0)),
        (dict(do_sample=True, top_p=0.5), dict(temperature=1.0, top_p=0.5)),
        (dict(do_sample=False, temperature=0.6, top_p=0.5), dict(temperature=0.0, top_p=0.5)),
        (dict(do_sample=None, temperature=None, top_k=None), {}),
        (dict(top_k=-1), dict(top_k=0)),
        (dict(eos_token_id=2, max_length=20, transformers_version="5"), {}),
    ],
)
def test_sampling_values_are_defaults(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = default_sampling(write(tmp_path, **config))
    assert (found.values, found.not_applied) == (expected, {})
    assert found.params() == SamplingParams(**expected)


def test_what_a_caller_gives_counts(tmp_path: Path) -> None:
    found = default_sampling(write(tmp_path, temperature=0.6, top_k=20))
    assert found.params(temperature=0, seed=1) == SamplingParams(temperature=0, top_k=20, seed=1)
    found = default_sampling(write(tmp_path, max_new_tokens=50))
    for given in {"max_tokens": 7}, {"max_new_tokens": 7}:  # two names of one thing
        assert found.params(**given).max_new_tokens == 7
    assert found.params(max_tokens=None).max_new_tokens == 50


def test_what_is_the_default_anyway_is_not_said(tmp_path: Path) -> None:
    off = dict(do_sample=False, top_k=-1, top_p=1, min_p=0.0, max_new_tokens=128)
    found = default_sampling(write(tmp_path, **off))
    assert found.params() == SamplingParams() and found.message() is None
    message = default_sampling(write(tmp_path, **off | {"top_k": 20})).message()
    assert message == "generation_config.json: default sampling top_k 20"


def test_no_file_asks_for_nothing(tmp_path: Path) -> None:
    found = default_sampling(tmp_path)
    assert found.params() == SamplingParams()
    assert found.message() is None


@pytest.mark.parametrize(
    ("key", "neutral", "value"),
    [
        ("no_repeat_ngram_size", 0, 3),
        ("num_beams", 1, 4),
        ("typical_p", 1.0, 0.9),
        ("suppress_tokens", [], [7]),
        ("stop_strings", None, ["x"]),
    ],
)
def test_what_is_not_supported_is_told_apart(
    tmp_path: Path, key: str, neutral: Any, value: Any
) -> None:
    assert default_sampling(write(tmp_path, **{key: neutral})).message() is None
    found = default_sampling(write(tmp_path, temperature=0.5, **{key: value}))
    assert found.not_applied == {key: value}
    message = found.message()
    assert message is not None and "default sampling temperature 0.5" in message
    assert f"not supported, so not applied: {key} {value!r}" in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", "0.6", "temperature is '0.6'; expected a finite number, 0 or more"),
        ("temperature", -1, "temperature is -1; expected a finite number"),
        ("temperature", float("nan"), "temperature is nan; expected a finite number"),
        ("top_k", -2, "top_k is -2; expected an integer, -1 or more"),
        ("top_k", 2.5, "top_k is 2.5; expected an integer"),
        ("top_p", 0, r"top_p is 0; expected a number in \(0, 1\]"),
        ("min_p", 2, "min_p is 2; expected a number in"),
        ("max_new_tokens", 0, "max_new_tokens is 0; expected an integer, 1 or more"),
        ("do_sample", "yes", "do_sample: expected true or false, got 'yes'"),
    ],
)
def test_bad_values_are_refused_by_file_and_key(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    with pytest.raises(TokenizerError, match=f"generation_config.json: {expected}"):
        default_sampling(write(tmp_path, **{key: value}))

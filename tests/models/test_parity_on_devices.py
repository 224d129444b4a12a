"""Logits against transformers in float32, on several devices: experts spread over them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.golden_cases import CASES, DATA, Golden
from tests.models.parity import (
    PREFILL,
    check_against_golden,
    feed,
    make_runner,
    shuffled_pages,
)


def _mixtures() -> list[str]:
    """One case, the last, of each architecture that has experts."""
    configs = {name: json.loads((DATA / name / "config.json").read_text()) for name in CASES}
    last = {
        config["model_type"]: name
        for name, config in configs.items()
        if any("experts" in key for key in config)
    }
    return list(last.values())


QUICK = ("deepseek_v3_fp8",)  # dense layers, sigmoid routing with groups, shared experts
ON_FOUR = [
    pytest.param(name, count, marks=[] if count == 2 and name in QUICK else [pytest.mark.slow])
    for name in _mixtures()
    for count in (1, 2)
]


@pytest.mark.parametrize(("name", "micro_batches"), ON_FOUR)
def test_experts_on_four_devices(name, micro_batches):
    runner = make_runner(name, devices=4, micro_batches=micro_batches)
    # A program more takes long to compile: the shape of decode steps with one of the two.
    check_against_golden(runner, name, decode_bucket=micro_batches == 1 or name == "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_mixed"])
def test_all_gather_on_four_devices(name):
    runner = make_runner(name, devices=4, micro_batches=2, transport="all_gather")
    check_against_golden(runner, name, decode_bucket=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_scanned_micro_batches_on_four_devices(name):
    runner = make_runner(name, devices=4, micro_batches=2, scanned=True)
    check_against_golden(runner, name)


@pytest.mark.parametrize(
    ("devices", "micro_batches", "scanned"),
    [
        pytest.param(2, 3, False, marks=pytest.mark.slow),
        pytest.param(4, 3, True, marks=pytest.mark.slow),
        pytest.param(4, 4, True, marks=pytest.mark.slow),
    ],
)
def test_three_and_four_micro_batches(devices, micro_batches, scanned):
    """At the end there are fewer tokens than micro-batches."""
    runner = make_runner("qwen3_moe", devices=devices, micro_batches=micro_batches, scanned=scanned)
    check_against_golden(runner, "qwen3_moe", decode_bucket=devices == 4)


def test_micro_batches_agree_closer_than_the_oracle():
    """Two micro-batches against one, on the same weights: 1e-5."""
    golden = Golden("qwen3_moe")
    pages = shuffled_pages(0, golden.tokens)
    chunks = [(0, tokens) for tokens in golden.tokens]
    results = []
    for count in (1, 2):
        runner = make_runner("qwen3_moe", devices=2, micro_batches=count)
        found, _ = feed(runner, runner.allocate(), PREFILL, chunks, pages)
        results.append(np.concatenate([x for i in sorted(found) for x in found[i]]))
    np.testing.assert_allclose(*results, atol=1e-5, rtol=0)

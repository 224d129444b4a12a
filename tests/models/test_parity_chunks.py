"""Steps with the expert exchange in chunks: against transformers, and against the plain step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tbo_jax import Bucket
from tests.golden_cases import Golden
from tests.models.parity import (
    DECODE,
    PREFILL,
    check_against_golden,
    feed,
    make_runner,
    shuffled_pages,
)

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Dense layers, routing in groups, shared experts.
        ("deepseek_v3_fp8", dict(devices=2)),
        # Attention on two devices of a rank.
        pytest.param("qwen3_moe_mixed", dict(devices=4, tensor=2), marks=slow),
        pytest.param("glm4_moe", dict(devices=4, tensor=2), marks=slow),
        pytest.param("qwen2_moe", dict(devices=2, scanned=True, expert_chunks=4), marks=slow),
        pytest.param("gpt_oss", dict(devices=2), marks=slow),  # biases of experts
        pytest.param("mixtral", dict(devices=2, transport="ragged_all_to_all"), marks=slow),
        pytest.param("qwen3_moe", dict(devices=2, transport="all_gather"), marks=slow),
        pytest.param("qwen3_moe", dict(devices=4, nodes=2, transport="two_level"), marks=slow),
        pytest.param("qwen3_moe", dict(devices=1), marks=slow),  # nothing travels
    ],
)
def test_chunks_against_transformers(name: str, options: dict[str, Any]) -> None:
    runner = make_runner(name, **{"expert_chunks": 2} | options)
    check_against_golden(runner, name)


def logits_of(**options: Any) -> np.ndarray:
    """Of a prefill of all sequences, and a decode step of each, whose ranks differ."""
    golden = Golden("qwen3_moe")
    pages = shuffled_pages(0, golden.tokens)
    runner = make_runner("qwen3_moe", **options)
    whole = [(0, tokens[:-1]) for tokens in golden.tokens]
    found, buffers = feed(runner, runner.allocate(), PREFILL, whole, pages)
    # Of some sequences nothing, so that there is padding.
    after = [
        (len(tokens) - 1, tokens[-1:] if len(tokens) > 1 and i % 2 else [])
        for i, tokens in enumerate(golden.tokens)
    ]
    decoded, _ = feed(runner, buffers, DECODE, after, pages)
    return np.concatenate([x for of in (found, decoded) for i in sorted(of) for x in of[i]])


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return logits_of(devices=2)


@pytest.mark.parametrize(
    "options",
    [
        dict(expert_chunks=2),
        pytest.param(dict(expert_chunks=4), marks=slow),
        dict(expert_chunks=2, scanned=True),
        pytest.param(dict(expert_chunks=2, transport="ragged_all_to_all"), marks=slow),
        pytest.param(
            dict(expert_chunks=4, transport="ragged_all_to_all", scanned=True), marks=slow
        ),
        pytest.param(dict(expert_chunks=2, transport="all_gather"), marks=slow),
        pytest.param(dict(expert_chunks=2, transport="two_level", nodes=2), marks=slow),
    ],
    ids=str,
)
def test_chunks_equal_the_plain_step(plain: np.ndarray, options: dict[str, Any]) -> None:
    found = logits_of(devices=2, **options)
    np.testing.assert_allclose(found, plain, atol=1e-5, rtol=0)


@slow
def test_chunks_of_steps_that_verify_drafts() -> None:
    golden = Golden("qwen3_moe")
    pages = shuffled_pages(0, golden.tokens)
    verify = Bucket(32, 8, True, 3)
    results = []
    for count in (1, 2):
        runner = make_runner("qwen3_moe", devices=2, expert_chunks=count)
        start = [(0, tokens[: len(tokens) // 2]) for tokens in golden.tokens]
        _, buffers = feed(runner, runner.allocate(), PREFILL, start, pages)
        rest = [(len(t) // 2, t[len(t) // 2 :][:4]) for t in golden.tokens]
        found, _ = feed(runner, buffers, verify, rest, pages)
        results.append(np.concatenate([x for i in sorted(found) for x in found[i]]))
    np.testing.assert_allclose(*results, atol=1e-5, rtol=0)


def test_messages_and_computes_are_in_order() -> None:
    """Each compute but the first waits for the one before, each message for the one before."""
    runner = make_runner("qwen3_moe", devices=2, expert_chunks=2)
    plain = make_runner("qwen3_moe", devices=2)
    found, without = (
        str(one.lower(DECODE).as_text()).count("optimization_barrier") for one in (runner, plain)
    )
    # The first message waits for what is told ahead, the second one for it, the second chunk for
    # the first, and the last message back for the first one back; and the second message back.
    assert found - without == 5 * runner.config.num_layers


def test_what_has_no_experts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="strategy 'expert_chunks' is for experts, and this llama"):
        make_runner("llama", devices=2, tensor=2, expert_chunks=2)
    with pytest.raises(ValueError, match="expert_chunks is 16: expected 4 at most"):
        make_runner("qwen3_moe", devices=2, expert_chunks=16)

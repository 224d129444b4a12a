"""Logits against transformers in float32, on one device: one and two micro-batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax import ModelRunner
from tbo_jax.checkpoint.load import load_model
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import CASES, Golden
from tests.models.parity import (
    CACHE,
    PREFILL,
    check_against_golden,
    feed,
    make_runner,
    shuffled_pages,
)

# What these differ in from the case "llama" does not meet the split, or others split it on devices.
NOT_SPLIT = {"deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "llama_bias",
             "llama_rope_linear", "llama_rope_llama3", "llama_rope_yarn", "llama_sharded",
             "llama_tied_bf16", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen2_vl",
             "qwen3_rope_yarn"}  # fmt: skip
ON_DEVICES = {"deepseek_v3_fp8", "gpt_oss_mxfp4"}  # in test_parity_on_devices.py
SPLIT_ON_DEVICES = {"qwen3", "qwen3_moe", "qwen3_moe_mixed"}  # there, and layers like llama's


def is_covered(name: str, micro_batches: int) -> bool:
    """Whether a quicker test, or one that shows more, has the same."""
    return (micro_batches > 1 and name in NOT_SPLIT | SPLIT_ON_DEVICES) or name in ON_DEVICES


UNROLLED = [
    pytest.param(name, count, marks=[pytest.mark.slow] if is_covered(name, count) else [])
    for name in CASES
    for count in (1, 2)
]


@pytest.mark.parametrize(("name", "micro_batches"), UNROLLED)
def test_unrolled_logits(name, micro_batches):
    check_against_golden(make_runner(name, micro_batches=micro_batches), name)


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        pytest.param("llama", 1, marks=pytest.mark.slow),  # of two it is not
        ("llama", 2),
        ("qwen3_moe", 1),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.slow),  # on devices it is not
    ],
)
def test_scanned_logits(name, micro_batches):
    runner = make_runner(name, micro_batches=micro_batches, scanned=True)
    check_against_golden(runner, name, decode_bucket=True)


@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "gpt_oss"])  # experts, window
def test_scan_of_unequal_layers_is_refused(name):
    with pytest.raises(ValueError, match="cannot be scanned"):
        make_runner(name, scanned=True)


# In bfloat16 a token may go to another expert than in float32, so few tokens may differ by more.
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("llama_tied_bf16", 1.0),
        pytest.param("qwen2_moe", 0.9, marks=pytest.mark.slow),
        ("glm4_moe", 0.9),
        pytest.param("deepseek_v3", 0.9, marks=pytest.mark.slow),
        # Its weights are in float32, and rounded too.
        pytest.param("deepseek_v3_fp8", 0.85, marks=pytest.mark.slow),
        pytest.param("gpt_oss_mxfp4", 0.9, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_weights_and_cache(name, share):
    mesh = make_mesh(1)
    golden = Golden(name)
    model = load_model(golden.folder, mesh=mesh, dtype=jnp.bfloat16)
    runner = ModelRunner(model, CACHE, mesh=mesh, logits="all")
    pages = shuffled_pages(0, golden.tokens)
    chunks = [(0, tokens) for tokens in golden.tokens]
    with jax.numpy_dtype_promotion("standard"):  # the norm of Flax relies on it in bfloat16
        found, buffers = feed(runner, runner.allocate(), PREFILL, chunks, pages)
    assert buffers.cache.pages[0][0].dtype == jnp.bfloat16
    logits = np.concatenate([found[i][0] for i in sorted(found)])
    expected = np.concatenate(golden.logits)
    # bfloat16 keeps 8 bits: 1 % of the range of the logits, over two layers.
    close = np.abs(logits - expected).max(-1) < 0.05 * np.abs(expected).max()
    assert close.mean() >= share

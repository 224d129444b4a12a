"""Whole steps of a model over the transports: equal logits, and the bytes that they send."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax import Bucket, CacheConfig, ForwardBatch, ModelRunner, OverlapConfig
from tbo_jax.checkpoint.load import load_model
from tbo_jax.engine.auto.store import decision_key
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import Golden

DEVICES = 4
CACHE = CacheConfig(num_pages=9, page_size=4, pages_per_sequence=4, max_tokens=8)
BUCKET = Bucket(8, 2)


def make_runner(micro_batches: int = 2, nodes: int = 1, **options: Any) -> ModelRunner:
    mesh = make_mesh(DEVICES, nodes=nodes)
    model = load_model(Golden("qwen3_moe").folder, mesh=mesh, dtype=jnp.float32)
    overlap = OverlapConfig("on" if micro_batches > 1 else "off")
    return ModelRunner(model, CACHE, mesh=mesh, overlap=overlap, **options)


def logits_of(runner: ModelRunner) -> np.ndarray:
    """[R, B, V], of ranks with two sequences, one or none."""
    sequences = [[[5, 6, 7], [8, 9]], [[4]], [], [[3, 2], [11, 12, 13]]]
    batches = [
        ForwardBatch.pack(
            tokens,
            [0] * len(tokens),
            [[1], [2]][: len(tokens)],
            token_capacity=BUCKET.tokens,
            sequence_capacity=BUCKET.sequences,
            pages_per_sequence=CACHE.pages_per_sequence,
        )
        for tokens in sequences
    ]
    logits, _ = runner.step(BUCKET, runner.allocate(), stack_batches(batches))
    live = [[row < len(tokens) for row in range(2)] for tokens in sequences]
    return np.asarray(logits)[np.array(live)]


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return logits_of(make_runner(1))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_ragged_transport_gives_the_same_logits(expected, micro_batches: int) -> None:
    found = logits_of(make_runner(micro_batches, transport="ragged_all_to_all"))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_two_level_transport_gives_the_same_logits(expected, micro_batches: int) -> None:
    found = logits_of(make_runner(micro_batches, nodes=2, transport="two_level"))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_rounding_to_8_bits_changes_logits_a_little(expected) -> None:
    found = logits_of(make_runner(transport="ragged_all_to_all", dispatch_dtype="float8_e4m3fn"))
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_link_bytes_of_a_step(micro_batches: int) -> None:
    runner = make_runner(micro_batches)
    config = runner.config
    layers = sum(config.is_sparse(layer) for layer in range(config.num_layers))
    beside = -(-3 * config.num_experts_per_token // 4) * 4  # filled up to 16 bytes
    width = 2 * config.hidden_size + beside  # there and back
    assert runner.link_bytes(BUCKET) == layers * (DEVICES - 1) * BUCKET.tokens * width * 4
    ragged = make_runner(micro_batches, transport="ragged_all_to_all")
    rounded = make_runner(micro_batches, dispatch_dtype="int8")
    assert rounded.link_bytes(BUCKET) < runner.link_bytes(BUCKET)
    assert ragged.link_bytes(BUCKET) <= runner.link_bytes(BUCKET) + layers * micro_batches * 24


def test_a_rounded_step_is_timed_on_its_own() -> None:
    keys = [decision_key(make_runner(dispatch_dtype=d), BUCKET) for d in (None, "int8")]
    assert [key["dispatch_dtype"] for key in keys] == [None, "int8"]
    assert keys[0] != keys[1]

"""A batch as two arrays, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax import Bucket, CacheConfig, ForwardBatch, Inputs
from tbo_jax.checkpoint.load import read_config
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.step.packed import pack_numbers, unpack_numbers
from tests.golden_cases import Golden

RANKS, BUCKET, CACHE = 3, Bucket(8, 4), CacheConfig(9, 4, 5, 8)
CONFIG, _ = read_config(Golden("qwen3_moe").folder, jnp.float32)


def shapes_of(inputs: Inputs) -> ForwardBatch:
    return inputs.abstract_batch(BUCKET, CACHE, CONFIG, RANKS)


def drawn(shapes: ForwardBatch, seed: int = 0) -> ForwardBatch:
    """Any numbers of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.integers(-(2**31), 2**31, a.shape).astype(a.dtype), shapes)


@pytest.mark.parametrize(
    "inputs",
    [Inputs(), Inputs(mrope=True, embeds=True), Inputs(mask_offsets=2, rotary_tables=6)],
    ids=str,
)
@pytest.mark.parametrize("on_device", [False, True])
def test_comes_back(inputs: Inputs, on_device: bool) -> None:
    shapes = shapes_of(inputs)
    batch = drawn(shapes)
    given = jax.tree.map(jnp.asarray, batch) if on_device else batch
    numbers, rest = pack_numbers(given, shapes)
    assert isinstance(numbers, jax.Array if on_device else np.ndarray)
    assert numbers.dtype == np.int32
    floats = inputs.embeds + bool(inputs.rotary_tables)
    assert len(jax.tree.leaves(rest)) == 1 + floats  # the tokens, and what is no whole number
    for rank in range(RANKS):
        one = jax.tree.map(lambda leaf, rank=rank: leaf[rank], rest)
        found = unpack_numbers(jnp.asarray(numbers[rank]), one, shapes)
        expected = jax.tree.map(lambda leaf, rank=rank: leaf[rank], batch)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_numbers_are_copied() -> None:
    shapes = shapes_of(Inputs())
    batch = drawn(shapes)
    numbers, rest = pack_numbers(batch, shapes)
    before = numbers.copy(), rest.token_ids.copy()
    for leaf in jax.tree.leaves(batch):
        leaf[...] = 0
    np.testing.assert_array_equal(numbers, before[0])
    np.testing.assert_array_equal(rest.token_ids, before[1])


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("positions", lambda a: a[:, :-1], r"positions must be int32 \[3, 8\].*got int32 \[3, 7\]"),
        (
            "page_table",
            lambda a: a.astype(np.int64),
            r"page_table must be int32 \[3, 4, 5\].*int64",
        ),
        ("token_ids", lambda a: a[:2], r"token_ids must be int32 \[3, 8\] in this bucket, got int"),
    ],
)
def test_other_shapes_are_refused(name: str, change: Any, error: str) -> None:
    shapes = shapes_of(Inputs())
    batch = drawn(shapes)
    wrong = dataclasses.replace(batch, **{name: change(getattr(batch, name))})
    with pytest.raises(ValueError, match=error):
        pack_numbers(wrong, shapes)


def test_of_a_batch_that_was_packed() -> None:
    """Counts and lengths are [R] and [R, B] there."""
    batches = [
        ForwardBatch.pack(
            [[1, 2], [3]], [0, 4], [[1], [2, 3]],
            token_capacity=8, sequence_capacity=4, pages_per_sequence=5,
        )
        for _ in range(RANKS)
    ]  # fmt: skip
    numbers, _ = pack_numbers(stack_batches(batches), shapes_of(Inputs()))
    assert numbers.shape[0] == RANKS

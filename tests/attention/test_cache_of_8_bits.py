"""Keys and values in 8 bits: what is written, and attention to it, on every platform's path."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.cpu_paged import CpuAttention
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.paged import XlaAttention, write_pages
from tbo_jax.attention.rounded import CACHE_DTYPES, STORED_AS, numbers, round_heads
from tbo_jax.attention.tpu_paged import TpuAttention
from tbo_jax.attention.work import AttentionWork, plan_attention
from tests.attention.ragged import Case, Options, Shape, case_of, mixes, reference

PLAIN = Options()
SHAPE = Shape(head_dim=16)
LATENT = Shape(kv_heads=1, head_dim=48, value_dim=32)
DTYPES = pytest.mark.parametrize("dtype", CACHE_DTYPES)
KERNELS: dict[str, Any] = {
    "xla": XlaAttention,
    "cpu": CpuAttention,
    "triton": partial(GpuAttention, interpret=True),
}


def decoded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """[T, G, H] as they come back from the cache."""
    stored, factors = round_heads(jnp.asarray(values), STORED_AS[dtype])
    return np.asarray(numbers(stored, jnp.float32) * factors[..., None])


@DTYPES
def test_what_comes_back(dtype: Any) -> None:
    """Half a step of int8, 1/16 of a float8; heads of other sizes change nothing."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 3, 64)).astype(np.float32) * np.float32([1e-6, 1, 1e6])[:, None]
    largest = np.abs(values).max(-1, keepdims=True)
    error = np.abs(decoded(values, dtype) - values)
    if dtype == "int8":
        assert (error <= largest / 127 * 0.5001).all()
    else:
        assert (error <= np.maximum(np.abs(values) / 16, largest / 448 * 2.0**-10)).all()
    assert not decoded(np.zeros((2, 3, 8), np.float32), dtype).any()
    again = decoded(decoded(values, dtype), dtype)
    np.testing.assert_allclose(again, decoded(values, dtype), rtol=1e-6)


@DTYPES
def test_a_nan_stays_one(dtype: Any) -> None:
    values = np.ones((2, 2, 4), np.float32)
    values[0, 1, 2] = np.nan
    found = decoded(values, dtype)
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[0, 0]).all() and np.isfinite(found[1]).all()


def rounded(case: Case, dtype: Any) -> tuple[Case, LayerCache]:
    """The case with keys and values as the cache returns them, and that cache.

    What nobody has written has a NaN for a factor, and in float8_e4m3fn for numbers.
    """
    shape = case.shape
    width = shape.head_dim

    def of_row(keys: np.ndarray) -> np.ndarray:
        return decoded(keys, dtype)

    rows = []
    for context, length, keys, values in case.rows:
        keys = of_row(keys)
        values = keys[..., : shape.value_dim] if shape.value_dim else of_row(values)
        rows.append((context, length, keys, values))
    pages, factors = [], []
    for stored in case.cache.pages:
        by_head = np.asarray(stored).reshape(-1, shape.kv_heads, width)
        there, factor = round_heads(jnp.asarray(by_head), STORED_AS[dtype])
        pages.append(np.asarray(there).reshape(stored.shape))
        factors.append(np.asarray(factor).reshape(*stored.shape[:2], shape.kv_heads))
    return dataclasses.replace(case, rows=rows), LayerCache(
        tuple(pages), case.cache.first_page, tuple(factors)
    )


def attend(batch, cache, queries, keys, values, *, query_block, options, shape, kernel, dtype):
    """One layer's write and read."""
    cache = write_pages(cache, keys, values, batch)
    work = plan_attention(batch, query_block, AttentionWork.zeros(1, shape.tokens))
    held = dataclasses.replace(shape.attention, cache_dtype=dtype)
    out = KERNELS[kernel](held)(
        queries, cache, batch, work, query_block=query_block, scale=shape.scale,
        **options.arguments(shape.heads),
    )  # fmt: skip
    return out, cache


@cache
def compiled(*static: Any) -> Any:
    names = ("query_block", "options", "shape", "kernel", "dtype")
    return jax.jit(partial(attend, **dict(zip(names, static, strict=True))))


@DTYPES
@pytest.mark.parametrize(
    ("kernel", "query_block", "options", "shape"),
    [
        ("xla", 16, Options(window=5, with_sinks=True), SHAPE),
        pytest.param("xla", 1, PLAIN, LATENT, marks=pytest.mark.slow),
        ("cpu", 1, PLAIN, SHAPE),
        pytest.param("cpu", 16, PLAIN, SHAPE, marks=pytest.mark.slow),
        ("cpu", 16, PLAIN, LATENT),
        ("triton", 16, Options(window=40, with_sinks=True), SHAPE),
        pytest.param("triton", 1, PLAIN, SHAPE, marks=pytest.mark.slow),
        pytest.param("triton", 4, PLAIN, LATENT, marks=pytest.mark.slow),
    ],
)
@settings(max_examples=3, deadline=None)
@given(mix=mixes(SHAPE), seed=st.integers(0, 99), layer=st.sampled_from([0, 1]))
@example(mix=([1, 17, 1, 5], [64, 120, 0, 0]), seed=2, layer=1)
@example(mix=([], []), seed=3, layer=0)
def test_attention_is_that_to_the_decoded_cache(
    mix: Any,
    seed: int,
    layer: int,
    kernel: str,
    query_block: int,
    options: Options,
    shape: Shape,
    dtype: Any,
) -> None:
    case = case_of(shape, *mix, seed, layer)
    case, before = rounded(case, dtype)
    run = compiled(query_block, options, shape, kernel, dtype)
    out, after = run(case.batch, before, case.queries, case.keys, case.values)
    count = len(case.slots)
    # The weights of the softmax are multiplied by the factors before they are rounded or summed.
    np.testing.assert_allclose(out[:count], reference(case, options), atol=1e-5, rtol=0)
    assert not np.asarray(out[count:]).any()
    new = (case.keys, case.values)[: len(before.pages)]
    for of_page, of_new, old in zip(after.pages, new, before.pages, strict=True):
        expected = np.array(old)
        stored = np.asarray(round_heads(jnp.asarray(of_new), STORED_AS[dtype])[0])
        for token, (page, slot) in enumerate(case.slots):
            expected[page, slot] = stored[token].reshape(-1)
        np.testing.assert_array_equal(of_page, expected)


def test_what_does_not_take_it_says_so() -> None:
    shape = AttentionShape(32, 4, 128, jnp.bfloat16, cache_dtype="int8")
    assert "int8" in str(TpuAttention.unsupported(shape))
    assert GpuAttention.unsupported(shape) is None
    assert shape.cached_bytes == 2 * 4 * (128 + 4)
    latent = AttentionShape(128, 1, 576, jnp.bfloat16, 512, cache_dtype="float8_e4m3fn")
    assert latent.cached_bytes == 576 + 4

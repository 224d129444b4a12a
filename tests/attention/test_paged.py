"""Paged attention against a full softmax per sequence, in numpy."""

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

from tbo_jax import gather_tokens, split_batch_decoder_layers
from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.cpu_paged import CpuAttention
from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.paged import XlaAttention, write_pages
from tbo_jax.attention.work import AttentionWork, plan_attention
from tests.attention.ragged import (
    Case,
    Options,
    Shape,
    case_of,
    mixes,
    reference,
    with_mask,
    without_unseen,
)

# Rows of up to 320 keys, three blocks of them: 20 pages are no whole number of blocks of 8.
SHAPE, PLAIN = Shape(), Options()
TOKENS = SHAPE.tokens
# The values are the first 8 of a key's 12 elements.
LATENT = Shape(kv_heads=1, head_dim=12, value_dim=8)


KERNELS = pytest.mark.parametrize("kernel", [XlaAttention, CpuAttention])


def attend(
    batch, cache, queries, keys, values, *, query_block, options, shape=SHAPE, kernel=XlaAttention
):
    """One layer's write and read, as the context of the models does it."""
    # The work arrays are longer than needed and hold what an earlier step left there.
    old = AttentionWork(*(jnp.full(TOKENS + 3, 4321, jnp.int32) for _ in range(5)))
    cache = write_pages(cache, keys, values, batch)
    work = plan_attention(batch, query_block, old)
    out = kernel(shape.attention)(
        queries, cache, batch, work, query_block=query_block, scale=shape.scale,
        **options.arguments(shape.heads),
    )  # fmt: skip
    return out, cache


def attend_in_parts(batch, cache, queries, keys, values, *, query_block, count, keep_spans=False):
    """The same through `count` micro-batches, which share the cache one after another."""
    parts = split_batch_decoder_layers(batch, count, keep_spans=keep_spans)
    bounds, outs = 0, []
    for part in parts:
        at = jnp.minimum(bounds + jnp.arange(part.token_capacity, dtype=jnp.int32), TOKENS - 1)
        bounds = bounds + part.num_tokens
        q, k, v = queries[at], keys[at], values[at]
        out, cache = attend(part, cache, q, k, v, query_block=query_block, options=PLAIN)
        outs.append(out)
    return gather_tokens(outs, parts, jnp.arange(TOKENS, dtype=jnp.int32)), cache


in_parts = jax.jit(partial(attend_in_parts, query_block=16, count=2))
spans_in_parts = jax.jit(partial(attend_in_parts, query_block=8, count=3, keep_spans=True))


@cache
def compiled(
    query_block: int, options: Options, shape: Shape = SHAPE, kernel: Any = XlaAttention
) -> Any:
    return jax.jit(
        partial(attend, query_block=query_block, options=options, shape=shape, kernel=kernel)
    )


def check_cache(case: Case, cache: LayerCache) -> None:
    """The new keys and values stand in their slots, and not one bit changed anywhere else."""
    new_of_each = (case.keys, case.values)[: len(case.cache.pages)]
    for before, after, new in zip(case.cache.pages, cache.pages, new_of_each, strict=True):
        expected = np.array(before)
        for token, (page, slot) in enumerate(case.slots):
            expected[page, slot] = new[token].reshape(-1)
        assert expected.tobytes() == np.asarray(after).tobytes()


def check(
    case: Case, out: jax.Array, cache: LayerCache, atol: float, options: Options = PLAIN
) -> None:
    count = len(case.slots)
    found = np.asarray(out).astype(np.float32)
    np.testing.assert_allclose(found[:count], reference(case, options), atol=atol, rtol=0)
    assert not found[count:].any()
    check_cache(case, cache)


@KERNELS
@pytest.mark.parametrize(
    ("query_block", "options"),
    [
        (1, PLAIN),
        (16, PLAIN),
        (16, Options(window=5)),
        (16, Options(with_sinks=True)),
        (1, Options(window=150, with_sinks=True)),
    ],
)
@settings(max_examples=15, deadline=None)
@given(mix=mixes(SHAPE), seed=st.integers(0, 99), layer=st.sampled_from([0, 1]))
@example(mix=([TOKENS], [0]), seed=0, layer=1)
@example(mix=([1, 1, 1, 1], [255, 0, 128, 319]), seed=1, layer=0)
@example(mix=([1, 17, 1, 5], [64, 120, 0, 0]), seed=2, layer=1)
@example(mix=([], []), seed=3, layer=0)
def test_ragged_batches_equal_the_full_softmax(
    mix: tuple[list[int], list[int]],
    seed: int,
    layer: int,
    query_block: int,
    options: Options,
    kernel: Any,
) -> None:
    case = case_of(SHAPE, *mix, seed, layer)
    run = compiled(query_block, options, kernel=kernel)
    out, cache = run(case.batch, case.cache, case.queries, case.keys, case.values)
    check(case, out, cache, 2e-6, options)


@KERNELS
@pytest.mark.parametrize("query_block", [1, 16])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_what_is_before_the_window_may_be_anything(
    window: int, query_block: int, kernel: Any
) -> None:
    """These pages are given up, and others may write NaN to them."""
    for seed, mix in enumerate([([1, 17, 1, 5], [64, 120, 300, 0]), ([9, 1], [200, 33])]):
        case = case_of(SHAPE, *mix, seed, seed % 2)
        case = without_unseen(case, window)
        run = compiled(query_block, Options(window=window), kernel=kernel)
        out, cache = run(case.batch, case.cache, case.queries, case.keys, case.values)
        check(case, out, cache, 2e-6, Options(window=window))


@KERNELS
@pytest.mark.parametrize("query_block", [1, 16])
@settings(max_examples=8, deadline=None)
@given(mix=mixes(LATENT), seed=st.integers(0, 99), layer=st.sampled_from([0, 1]))
@example(mix=([1, 17, 1, 5], [64, 120, 0, 0]), seed=2, layer=1)
def test_latent_pages_hold_values_in_their_keys(
    mix: tuple[list[int], list[int]], seed: int, layer: int, query_block: int, kernel: Any
) -> None:
    case = case_of(LATENT, *mix, seed, layer)
    run = compiled(query_block, PLAIN, LATENT, kernel)
    out, cache = run(case.batch, case.cache, case.queries, case.keys, case.values)
    check(case, out, cache, atol=2e-6)


@KERNELS
@pytest.mark.parametrize(
    ("query_block", "options", "shape"),
    [
        (16, PLAIN, SHAPE),
        (1, Options(window=30, with_sinks=True), SHAPE),
        (8, PLAIN, LATENT),
    ],
)
@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from([1, 2]), st.integers(0, 99))
def test_mask_offsets_say_what_a_token_sees(
    kernel: Any,
    query_block: int,
    options: Options,
    shape: Shape,
    data: Any,
    entries: int,
    seed: int,
) -> None:
    case = with_mask(case_of(shape, *data.draw(mixes(shape)), seed, seed % 2), entries, seed)
    run = compiled(query_block, options, shape, kernel)
    out, cache = run(case.batch, case.cache, case.queries, case.keys, case.values)
    check(case, out, cache, 2e-6, options)


def test_the_mask_of_causal_attention_changes_nothing() -> None:
    case = case_of(SHAPE, [1, 17, 1], [64, 120, 0], 2)
    place = np.concatenate([np.arange(c, c + n) for c, n, *_ in case.rows])
    place = np.pad(place, (0, TOKENS - len(place))).astype(np.int32)
    plain, *masked = (
        compiled(16, PLAIN)(
            dataclasses.replace(case.batch, mask_offsets=offsets),
            case.cache, case.queries, case.keys, case.values,
        )[0]
        for offsets in (None, 0 * place, np.stack([0 * place, place], 1).reshape(-1))
    )  # fmt: skip
    for out in masked:
        np.testing.assert_array_equal(out, plain)


def test_a_first_key_far_below_zero_is_the_first_of_all() -> None:
    case = case_of(SHAPE, [1, 17, 1], [64, 120, 0], 2)
    zeros = np.zeros(TOKENS, np.int32)
    from_zero, from_below = (
        compiled(16, PLAIN)(
            dataclasses.replace(case.batch, mask_offsets=offsets),
            case.cache, case.queries, case.keys, case.values,
        )[0]
        for offsets in (zeros, np.full_like(zeros, -(2**31)))
    )  # fmt: skip
    np.testing.assert_array_equal(from_below, from_zero)


@settings(max_examples=15, deadline=None)
@given(mixes(SHAPE), st.integers(0, 99))
@example(([TOKENS], [30]), 0)
@example(([1, 1, 20], [0, 9, 3]), 1)
def test_spans_that_stay_whole_see_the_same_in_micro_batches(
    mix: tuple[list[int], list[int]], seed: int
) -> None:
    case = with_mask(case_of(SHAPE, *mix, seed), 2, seed)
    out, cache = spans_in_parts(case.batch, case.cache, case.queries, case.keys, case.values)
    count = len(case.slots)
    np.testing.assert_allclose(out[:count], reference(case), atol=2e-6, rtol=0)
    check_cache(case, cache)


@settings(max_examples=15, deadline=None)
@given(mixes(SHAPE), st.integers(0, 99))
@example(([TOKENS], [30]), 0)
@example(([1], [30]), 1)
def test_micro_batches_in_order_equal_the_whole(
    mix: tuple[list[int], list[int]], seed: int
) -> None:
    case = case_of(SHAPE, *mix, seed)
    out, cache = in_parts(case.batch, case.cache, case.queries, case.keys, case.values)
    count = len(case.slots)
    np.testing.assert_allclose(out[:count], reference(case), atol=2e-6, rtol=0)
    check_cache(case, cache)


def test_bfloat16() -> None:
    case = case_of(dataclasses.replace(SHAPE, dtype=jnp.bfloat16), [1, 17, 2], [200, 40, 0], 5)
    run = compiled(16, PLAIN)
    out, cache = run(case.batch, case.cache, case.queries, case.keys, case.values)
    assert out.dtype == jnp.bfloat16
    check(case, out, cache, atol=2e-2)


def test_large_scores_do_not_overflow() -> None:
    case = case_of(SHAPE, [3, 1], [140, 300], 6)
    scaled = dataclasses.replace(case, queries=case.queries * np.float32(300))
    out, cache = compiled(16, PLAIN)(
        scaled.batch, scaled.cache, scaled.queries, scaled.keys, scaled.values
    )
    check(scaled, out, cache, atol=2e-4)


@pytest.mark.parametrize("query_block", [1, 4, 16])
def test_work_items_cover_every_token_once(query_block: int) -> None:
    lengths, contexts = [5, 0, 1, 16], [3, 9, 40, 0]
    batch = case_of(SHAPE, lengths, contexts, 0).batch
    work = plan_attention(batch, query_block, AttentionWork.zeros(1, TOKENS))
    covered = [
        (row, position + lane, token + lane)
        for row, token, queries, position in zip(
            *(np.asarray(a).tolist() for a in (
                work.row, work.first_token, work.num_queries, work.first_position
            )),
            strict=True,
        )
        for lane in range(queries)
    ]  # fmt: skip
    places = [
        (row, context + number)
        for row, (length, context) in enumerate(zip(lengths, contexts, strict=True))
        for number in range(length)
    ]
    assert covered == [(*place, token) for token, place in enumerate(places)]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (SHAPE, PLAIN),
        (SHAPE, Options(window=3)),
        (SHAPE, Options(window=3, with_sinks=True)),
        (LATENT, PLAIN),
    ],
)
def test_dense_attention_equals_paged_prefill(shape: Shape, options: Options) -> None:
    length = TOKENS // 3
    case = case_of(shape, [length] * 3, [0] * 3, 7)
    found = dense_causal_attention(
        *map(jnp.asarray, (case.queries, case.keys, case.values)),
        length=length, scale=shape.scale, **options.arguments(shape.heads),
    )  # fmt: skip
    np.testing.assert_allclose(found, reference(case, options), atol=2e-6, rtol=0)

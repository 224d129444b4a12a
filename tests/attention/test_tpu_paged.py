"""What surrounds JAX's TPU kernel. The kernel itself views its buffers in ways that Pallas' TPU
interpreter (jax 0.10 and 0.12) does not know, so what it promises is written out here instead.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tbo_jax.attention import tpu_paged
from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.paged import XlaAttention, write_pages
from tbo_jax.attention.tpu_paged import TpuAttention
from tbo_jax.attention.work import AttentionWork, plan_attention
from tests.attention.ragged import Case, Options, Shape, case_of, mixes, reference, with_mask

PLAIN = Options()
SHAPE = Shape(8, 2, 128, jnp.bfloat16, page_size=16, pages_per_row=4, tokens=12, rows=3)


def stand_in(
    queries, pages, key_lens, table, cu_query_lens, count, *, sm_scale, sliding_window,
    num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes,
):  # fmt: skip
    """The kernel's contract, all keys of a token at once; what it leaves unwritten is NaN."""
    tpu_paged.shipped.static_validate_inputs(
        queries, pages, key_lens, table, cu_query_lens, count, sm_scale=sm_scale,
        sliding_window=sliding_window,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block, vmem_limit_bytes=vmem_limit_bytes,
    )  # fmt: skip
    token = jnp.arange(queries.shape[0])
    row = jnp.sum(cu_query_lens[1:] <= token[:, None], axis=1)
    row = jnp.minimum(row, count[0] - 1)
    position = key_lens[row] - cu_query_lens[row + 1] + token
    held = pages[table[row]].astype(jnp.float32)  # [T, P, S, 2G, H]
    held = held.reshape(len(token), -1, *held.shape[3:])
    group = queries.shape[1] // (held.shape[2] // 2)
    keys, values = (jnp.repeat(held[:, :, n::2], group, axis=2) for n in range(2))
    scores = jnp.einsum("tnh,tsnh->tns", queries.astype(jnp.float32), keys) * sm_scale
    key = jnp.arange(keys.shape[1])
    seen = key <= position[:, None]
    if sliding_window is not None:
        seen &= key > position[:, None] - sliding_window
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    values = jnp.where(seen[:, :, None, None], values, 0.0)
    out = jnp.einsum("tns,tsnh->tnh", weights, values).astype(queries.dtype)
    return jnp.where((token < cu_query_lens[count[0]])[:, None, None], out, jnp.nan)


def interleaved(cache: LayerCache, head_dim: int) -> LayerCache:
    """Separate pages, laid out as the kernel wants them."""
    split = (np.reshape(p, (*p.shape[:2], -1, head_dim)) for p in cache.pages)
    both = np.stack(list(split), axis=3)
    shape = (*both.shape[:2], -1, head_dim)
    return LayerCache((jnp.asarray(both.reshape(shape)),), cache.first_page)


@cache
def compiled(options: Options) -> Any:
    """One layer's write and read: batch, cache, queries, keys, values -> output."""

    def attend(batch, cache, queries, keys, values):
        kernel = TpuAttention(SHAPE.attention)
        work = kernel.plan(batch, 4, AttentionWork.zeros(1, SHAPE.tokens))
        return kernel(
            queries, write_pages(cache, keys, values, batch), batch, work,
            query_block=4, scale=SHAPE.scale, **options.arguments(SHAPE.heads),
        )  # fmt: skip

    return jax.jit(attend)


def attend(case: Case, options: Options) -> jax.Array:
    cache = interleaved(case.cache, SHAPE.head_dim)
    with mock.patch.object(tpu_paged.shipped, "ragged_paged_attention", stand_in):
        return compiled(options)(case.batch, cache, case.queries, case.keys, case.values)


def check(case: Case, out: jax.Array, options: Options = PLAIN) -> None:
    found, count = np.asarray(out).astype(np.float32), len(case.slots)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(found[:count], reference(case, options), atol=2e-2, rtol=2e-2)
    assert not found[count:].any()


@pytest.mark.parametrize("options", [PLAIN, Options(window=5)], ids=str)
@settings(max_examples=15, deadline=None)
@given(mixes(SHAPE), st.integers(0, 99), st.sampled_from([0, 1]))
@example(([], []), 0, 0)
@example(([0, 0], [3, 9]), 0, 1)
@example(([0, 2, 0], [0, 7, 5]), 0, 1)
@example(([5, 0, 7], [0, 0, 50]), 0, 1)
def test_ragged_batches_equal_the_full_softmax(
    options: Options, mix: tuple[list[int], list[int]], seed: int, layer: int
) -> None:
    case = case_of(SHAPE, *mix, seed, layer)
    check(case, attend(case, options), options)


@settings(max_examples=15, deadline=None)
@given(mixes(SHAPE))
@example(([], []))
@example(([0, 2, 0], [0, 7, 5]))
def test_the_kernel_meets_no_row_without_tokens(mix: tuple[list[int], list[int]]) -> None:
    batch = case_of(SHAPE, *mix, 0).batch
    key_lens, table, cu_query_lens, count = map(np.asarray, jax.jit(tpu_paged.live_rows)(batch))
    lengths, contexts = (np.array(a, np.int32) for a in mix)
    live = lengths > 0
    if not live.any():  # a query and a key, in the padding page
        lengths, contexts, live = np.array([1]), np.array([0]), np.array([True])
        assert not table[0].any()
    else:
        np.testing.assert_array_equal(table[: live.sum()], batch.page_table[: len(live)][live])
    assert count.tolist() == [live.sum()]
    np.testing.assert_array_equal(np.diff(cu_query_lens)[: live.sum()], lengths[live])
    np.testing.assert_array_equal(key_lens[: live.sum()], (lengths + contexts)[live])


def test_interleaved_pages_hold_keys_at_even_heads() -> None:
    case = case_of(SHAPE, [3, 1], [20, 0], 2, layer=1)
    cache = interleaved(case.cache, SHAPE.head_dim)
    cache = write_pages(cache, jnp.asarray(case.keys), jnp.asarray(case.values), case.batch)
    for token, (page, slot) in enumerate(case.slots):
        held = np.asarray(cache.pages[0][page, slot])
        np.testing.assert_array_equal(held[0::2], case.keys[token])
        np.testing.assert_array_equal(held[1::2], case.values[token])


def test_a_table_too_large_for_scalar_memory_is_read_by_xla(caplog: Any) -> None:
    case = case_of(SHAPE, [1, 7], [30, 0], 3, layer=1)
    with (
        mock.patch.object(tpu_paged, "SCALAR_MEMORY", 3 * 128 * 4 - 1),
        caplog.at_level(logging.WARNING, "tbo_jax.attention.tpu_paged"),
    ):
        out = attend(case, Options(window=4))
    check(case, out, Options(window=4))
    assert "a table of 3 x 4 pages is too large" in caplog.text


def test_mask_offsets_are_never_ignored() -> None:
    case = with_mask(case_of(SHAPE, [1, 7], [30, 0], 3), 2, 0)
    kernel = TpuAttention(SHAPE.attention)
    with pytest.raises(ValueError, match="mask_offsets are not supported by the TPU kernel"):
        kernel(
            case.queries, case.cache, case.batch, AttentionWork.zeros(1, SHAPE.tokens),
            query_block=4, scale=1.0,
        )  # fmt: skip


def test_what_the_kernel_does_not_use_is_not_planned() -> None:
    """Its rows it walks itself; XLA's attention, where it stands in, needs the work items."""
    batch = case_of(SHAPE, [1, 7], [30, 0], 3).batch
    empty, kernel = AttentionWork.zeros(1, SHAPE.tokens), TpuAttention(SHAPE.attention)
    assert kernel.plan(batch, 4, empty) is empty
    with mock.patch.object(tpu_paged, "SCALAR_MEMORY", 3 * 128 * 4 - 1):
        assert kernel.plan(batch, 4, empty).num_queries.tolist()[:3] == [1, 4, 3]


@pytest.mark.parametrize("options", [PLAIN, Options(window=5, with_sinks=True)])
def test_xla_reads_both_layouts_alike(options: Options) -> None:
    case = case_of(SHAPE, [1, 7], [30, 9], 4, layer=1)

    @jax.jit
    def attend(batch, cache, queries, keys, values):
        work = plan_attention(batch, 4, AttentionWork.zeros(1, SHAPE.tokens))
        return XlaAttention(SHAPE.attention)(
            queries, write_pages(cache, keys, values, batch), batch, work,
            query_block=4, scale=SHAPE.scale, **options.arguments(SHAPE.heads),
        )  # fmt: skip

    one, other = (
        attend(case.batch, cache, case.queries, case.keys, case.values)
        for cache in (case.cache, interleaved(case.cache, SHAPE.head_dim))
    )
    np.testing.assert_array_equal(one, other)
    check(case, other, options)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "dtype", "more", "reason"),
    [
        (128, 4, jnp.bfloat16, {}, None),
        (128, 16, jnp.bfloat16, {}, None),
        (128, 4, jnp.float32, {}, "float32 would be rounded"),
        (64, 4, jnp.bfloat16, {}, "head size 64 is not 128"),
        (128, 6, jnp.bfloat16, {}, "6 key/value heads do not fill tiles"),
        (128, 4, jnp.bfloat16, dict(sinks=True), "it takes no sinks"),
        (128, 4, jnp.bfloat16, dict(masked=True), "it takes no mask offsets"),
        (128, 1, jnp.bfloat16, dict(value_dim=64), "it takes no latent pages"),
    ],
)
def test_unsupported(
    head_dim: int, kv_heads: int, dtype: Any, more: dict[str, Any], reason: str | None
) -> None:
    found = TpuAttention.unsupported(
        AttentionShape(2 * kv_heads, kv_heads, head_dim, dtype, **more)
    )
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("heads", "page_size", "per_sequence", "pages"),
    [
        (8, 64, 64, 16),
        (8, 64, 3, 3),
        (16, 64, 64, 8),
        (32, 64, 64, 8),
        (8, 16, 64, 16),
        (8, 4096, 9, 1),
    ],
)
def test_pages_of_a_block(heads: int, page_size: int, per_sequence: int, pages: int) -> None:
    cache = LayerCache((jnp.zeros((2, page_size, heads, 128), jnp.bfloat16),))
    assert tpu_paged.pages_per_block(cache, per_sequence) == pages

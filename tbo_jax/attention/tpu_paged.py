"""Paged attention on TPU: the ragged paged attention kernel that comes with JAX, as this library
calls it.

The kernel (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, made for vLLM on TPU) mixes
prefill and decode rows in one call. It wants keys and values interleaved in one array, so that a
page is one transfer, and walks the rows itself: the work items of a batch are not used here.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as shipped

from tbo_jax.attention import paged
from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.work import AttentionWork
from tbo_jax.overlap.batch import ForwardBatch

logger = logging.getLogger(__name__)

NAME = "ragged_paged_attention_kernel"  # as JAX names it
LANES = 128
TILE_HEADS = 16  # bfloat16 heads, keys and values, that the kernel computes together
QUERY_ROWS = 256  # queries x heads of a key/value head, in a step that prefills
KEY_BLOCK_BYTES = 2 << 20  # keys and values in fast memory at a time; there are two such blocks
MOST_PAGES = 16  # of a block: their transfers' descriptors live in a TensorCore's scalar registers
FAST_MEMORY = 32 << 20  # bytes that the kernel may take
SCALAR_MEMORY = 512 << 10  # bytes that a page table may take, of 1 MiB: more do not compile


def unsupported(head_dim: int, num_kv_heads: int, dtype: Any, sinks: bool) -> str | None:
    """Why attention of this shape, with or without `sinks`, cannot run here; None if it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name} would be rounded to bfloat16 by the matrix units"
    if head_dim != LANES:
        return f"head size {head_dim} is not {LANES}"
    if num_kv_heads % 8 and num_kv_heads not in (1, 2, 4):
        return f"{num_kv_heads} key/value heads do not fill tiles: 1, 2, 4 or a multiple of 8 do"
    if sinks:  # nor could they be put in afterwards: it keeps the sums of its softmax to itself
        return "it takes no sinks"
    return None


def query_block(group: int) -> int:
    """Queries of a block of a step that prefills, `group` heads of each to a key/value head."""
    return 1 << (max(1, QUERY_ROWS // group).bit_length() - 1)


def paged_attention(
    queries: jax.Array,
    cache: LayerCache,
    batch: ForwardBatch,
    work: AttentionWork,
    *,
    query_block: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each token to its sequence's keys; see `paged.paged_attention`.

    Args:
        queries: [T, N, H] bfloat16.
        cache: interleaved pages that hold the keys and values of this step's tokens already.
        batch: the batch.
        work: not used.
        query_block: queries that a program computes together. A row with fewer wastes the rest, so
            decode passes 1.
        scale: factor of the scores.
        sliding_window: a token sees itself and the `sliding_window - 1` keys before it.
        soft_cap: scores s become `cap * tanh(s / cap)` (Gemma 2).
        sinks: expected to be None; see `unsupported`.

    Returns:
        [T, N, H]; rows of padding tokens are zero.

    Raises:
        ValueError: `sinks`.
    """
    if sinks is not None:
        raise ValueError("sinks are not supported by the TPU kernel: expected None")
    rows, columns = batch.page_table.shape
    if 4 * rows * -(-columns // LANES) * LANES > SCALAR_MEMORY:
        _warn(rows, columns)
        return paged.paged_attention(
            queries, cache, batch, work,
            query_block=query_block, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
        )  # fmt: skip
    key_lens, table, cu_query_lens, count = live_rows(batch)
    out = shipped.ragged_paged_attention(
        queries,
        cache.pages[0],
        key_lens,
        table + cache.first_page,
        cu_query_lens,
        count,
        sm_scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        # Given: the kernel's own table asks for the device that is there, and there may be none.
        num_kv_pages_per_block=pages_per_block(cache, table.shape[1]),
        num_queries_per_block=query_block,
        vmem_limit_bytes=FAST_MEMORY,
    )
    # Rows of padding hold what was in fast memory before.
    live = (jnp.arange(queries.shape[0]) < batch.num_tokens)[:, None, None]
    return jnp.where(live, out, jnp.zeros_like(out))


@functools.cache
def _warn(rows: int, columns: int) -> None:
    logger.warning(
        "the TPU kernel for attention is not used: a table of %d x %d pages is too large for "
        "scalar memory (fewer rows or larger pages help); XLA's own is slower",
        rows,
        columns,
    )


def live_rows(batch: ForwardBatch) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows of a batch that have tokens, as the kernel wants them: it must meet no other.

    It fetches the keys of the next row ahead, and for a row without keys, behind the last token, or
    in a batch without rows, nobody takes what was fetched: the rows after it would get wrong keys.
    So rows without tokens are left out, and an empty batch is given a row: a query, and a key in
    the padding page. Its result is padding.

    Returns:
        keys of each row [B], page table [B, P], cumulative queries [B + 1], number of rows [1]; all
        int32.
    """
    row = jnp.arange(batch.sequence_capacity, dtype=jnp.int32)
    lengths = jnp.where(row < batch.num_sequences, batch.query_lens, 0)
    order = jnp.argsort(lengths == 0, stable=True)
    count = jnp.sum(lengths > 0, dtype=jnp.int32)
    empty = (count == 0) & (row == 0)
    lengths = jnp.where(empty, 1, lengths[order])
    key_lens = jnp.where(row < count, batch.context_lens[order] + lengths, empty.astype(jnp.int32))
    table = jnp.where(empty[:, None], 0, batch.page_table[order])
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    cu_query_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return key_lens, table, cu_query_lens, jnp.maximum(count, 1)[None]


def pages_per_block(cache: LayerCache, pages_per_sequence: int) -> int:
    """Pages that are in fast memory at a time."""
    _, page_size, heads, head_dim = cache.pages[0].shape
    heads = min(heads, TILE_HEADS) if heads % TILE_HEADS == 0 else heads
    page = page_size * heads * head_dim * cache.pages[0].dtype.itemsize
    return max(1, min(KEY_BLOCK_BYTES // page, MOST_PAGES, pages_per_sequence))


def expected_work(
    *,
    tokens: int,
    context: int,
    decode: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    cached: int,
    width: int,
) -> dict[str, tuple[float, float]]:
    """Floating-point operations and bytes of the kernel; see `gpu_paged.expected_work`.

    Each block of queries reads all keys of its sequence, also those that its mask hides.
    """
    blocks = tokens if decode else -(-tokens // query_block(heads // kv_heads))
    moved = blocks * context * cached + tokens * heads * (head_dim + value_dim)
    return {NAME: (2.0 * tokens * context * heads * (head_dim + value_dim), float(moved * width))}

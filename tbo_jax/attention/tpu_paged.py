"""Paged attention on TPU: the ragged paged attention kernel that comes with JAX, as this library
calls it.

The kernel (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, made for vLLM on TPU) mixes
prefill and decode rows in one call. It wants keys and values interleaved in one array, so that a
page is one transfer, and walks the rows itself: it needs no work items.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as shipped

from tbo_jax.attention.cache import LayerCache, PageLayout
from tbo_jax.attention.kernel import AttentionKernel, AttentionLoad, AttentionShape
from tbo_jax.attention.paged import XlaAttention
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


@dataclass(frozen=True)
class TpuAttention(AttentionKernel):
    """The kernel that this module is about."""

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        if shape.latent:
            return "it takes no latent pages"
        if shape.cache_dtype is not None:  # it has one factor for all tokens
            return f"it takes no factors of keys and values in {shape.cache_dtype}"
        dtype = jnp.dtype(shape.dtype)
        if dtype != jnp.bfloat16:
            return f"{dtype.name} would be rounded to bfloat16 by the matrix units"
        if shape.head_dim != LANES:
            return f"head size {shape.head_dim} is not {LANES}"
        if shape.kv_heads % 8 and shape.kv_heads not in (1, 2, 4):
            return (
                f"{shape.kv_heads} key/value heads do not fill tiles: 1, 2, 4 or a multiple of 8 do"
            )
        if shape.masked:
            return "it takes no mask offsets"
        if shape.sinks:  # nor could they be put in afterwards: it keeps its sums to itself
            return "it takes no sinks"
        return None

    @property
    def layout(self) -> PageLayout:
        return "interleaved"

    @property
    def query_block(self) -> int:
        # A row with fewer queries wastes the rest, so decode passes 1.
        return 1 << (max(1, QUERY_ROWS // self.shape.group).bit_length() - 1)

    def plan(self, batch: ForwardBatch, query_block: int, buffer: AttentionWork) -> AttentionWork:
        """`buffer` as it is: the kernel walks the rows itself."""
        if _fits_scalar_memory(batch):
            return buffer
        return super().plan(batch, query_block, buffer)

    def __call__(
        self, queries, cache, batch, work, *, query_block, scale, sliding_window=None, sinks=None
    ):
        if sinks is not None:
            raise ValueError("sinks are not supported by the TPU kernel: expected None")
        if batch.mask_offsets is not None:
            raise ValueError("mask_offsets are not supported by the TPU kernel: expected None")
        if not _fits_scalar_memory(batch):
            _warn(*batch.page_table.shape)
            return XlaAttention(self.shape)(
                queries, cache, batch, work, query_block=query_block, scale=scale,
                sliding_window=sliding_window,
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
            # Given: the kernel's own table asks for the device that is there; there may be none.
            num_kv_pages_per_block=pages_per_block(cache, table.shape[1]),
            num_queries_per_block=query_block,
            vmem_limit_bytes=FAST_MEMORY,
        )
        # Rows of padding hold what was in fast memory before.
        live = (jnp.arange(queries.shape[0]) < batch.num_tokens)[:, None, None]
        return jnp.where(live, out, jnp.zeros_like(out))

    def expected_work(self, load: AttentionLoad) -> dict[str, tuple[float, float]]:
        """Each block of queries reads all keys of its sequence, also those that its mask hides."""
        shape, tokens, context = self.shape, load.tokens, load.context
        blocks = tokens if load.decode else -(-tokens // self.query_block)
        of_token = shape.heads * (shape.head_dim + shape.value_elements)
        moved = blocks * context * shape.cached_elements + tokens * of_token
        return {NAME: (2.0 * tokens * context * of_token, float(moved * self._width))}


def _fits_scalar_memory(batch: ForwardBatch) -> bool:
    rows, columns = batch.page_table.shape
    return 4 * rows * -(-columns // LANES) * LANES <= SCALAR_MEMORY


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

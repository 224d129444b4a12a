"""Paged attention on CPU: products that take the keys as they lie, and only for blocks that exist.

Two things cost most there. XLA's libraries want the keys of one head at a time, so the gathered
keys of all heads were written once more, transposed. And a step that prefills has room for a block
of queries of every row, but often a single row has any. So

- with few queries, a query is as wide as the keys of all heads, zero but in the place of its own:
  the products multiply zeros instead. Attention alone of 16 rows at context 512, 30 layers of 9 and
  3 heads of 64, 2 cores: 27 ms for 44 (jax 0.10.2), 39 for 57 (0.12);
- in a step that prefills, the blocks with many queries are computed one after another, as many as
  there are, each over its own keys. Those with few, decodes and ends of prompts, go together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.paged import XlaAttention
from tbo_jax.attention.work import AttentionWork, num_work_items
from tbo_jax.overlap.batch import ForwardBatch

QUERY_BLOCK = 64
FEW_QUERIES = 8  # blocks of no more are computed together
WIDE_ROWS = 64  # up to so many, queries times heads, zeros are cheaper than a transpose
LONG_KEY_BLOCK = 256  # of a block of many queries


@dataclass(frozen=True)
class CpuAttention(XlaAttention):
    """Attention that XLA compiles for CPUs."""

    @property
    def query_block(self) -> int:
        return QUERY_BLOCK

    def __call__(self, queries, cache, batch, work, *, query_block, **options):
        if query_block > FEW_QUERIES:
            return self._of_prompts(queries, cache, batch, work, query_block, options)
        kv_heads = cache.num_kv_heads(queries.shape[-1])
        if kv_heads == 1 or queries.shape[1] * query_block > WIDE_ROWS:
            return super().__call__(queries, cache, batch, work, query_block=query_block, **options)
        wide = XlaAttention(replace(self.shape, kv_heads=1, head_dim=kv_heads * queries.shape[-1]))
        out = wide(
            _widened(queries, kv_heads), cache, batch, work, query_block=query_block, **options
        )
        return _narrowed(out, kv_heads)

    def _of_prompts(
        self,
        queries: jax.Array,
        cache: LayerCache,
        batch: ForwardBatch,
        work: AttentionWork,
        query_block: int,
        options: dict[str, Any],
    ) -> jax.Array:
        """[T, N, H] -> [T, N, V]; blocks of many queries one by one, those of few together."""
        tokens, heads, _ = queries.shape
        items = num_work_items(batch, query_block)
        own = jax.tree.map(lambda of_each: of_each[:items], work)
        few = own.num_queries <= FEW_QUERIES
        by_size = jnp.argsort(few, stable=True)  # the many first, in the order of their tokens
        num_many = jnp.sum(~few, dtype=jnp.int32)
        one_by_one = XlaAttention(self.shape, LONG_KEY_BLOCK)

        def block(index: jax.Array, out: jax.Array) -> jax.Array:
            at = by_size[index]
            one = jax.tree.map(lambda of_each: jax.lax.dynamic_slice_in_dim(of_each, at, 1), own)
            new = one_by_one.of_items(
                queries, cache, batch, one, query_block=query_block, **options
            )
            # Lanes behind the last query reach into the tokens of later blocks, which come later.
            return jax.lax.dynamic_update_slice_in_dim(out, new[0], one.first_token[0], 0)

        shape = (tokens + query_block, heads, self.shape.value_elements)
        out = jnp.zeros(shape, queries.dtype)
        with jax.named_scope("query_blocks"):
            out = jax.lax.fori_loop(0, num_many, block, out)[:tokens]

        # A row has one block of few queries at most: its last.
        count = min(items, batch.sequence_capacity)
        place = num_many + jnp.arange(count, dtype=jnp.int32)
        chosen = by_size[jnp.minimum(place, items - 1)]
        some = jax.tree.map(lambda of_each: of_each[chosen], own)
        some = replace(some, num_queries=jnp.where(place < items, some.num_queries, 0))
        together = self.of_items(queries, cache, batch, some, query_block=FEW_QUERIES, **options)
        token = jnp.arange(tokens, dtype=jnp.int32)
        item = work.token_item[:tokens]
        place = jnp.clip(jnp.argsort(by_size)[item] - num_many, 0, count - 1)
        lane = jnp.clip(token - own.first_token[item], 0, FEW_QUERIES - 1)
        out = jnp.where(few[item][:, None, None], together[place, lane], out)
        return jnp.where((token < batch.num_tokens)[:, None, None], out, jnp.zeros_like(out))


def _widened(queries: jax.Array, kv_heads: int) -> jax.Array:
    """[T, N, H] -> [T, N, G * H]: zeros but in the place of the query's key/value head."""
    tokens, heads, head_dim = queries.shape
    of_group = queries.reshape(tokens, kv_heads, heads // kv_heads, 1, head_dim)
    place = jnp.eye(kv_heads, dtype=bool)[:, None, :, None]
    wide = jnp.where(place, of_group, jnp.zeros_like(of_group))
    return wide.reshape(tokens, heads, kv_heads * head_dim)


def _narrowed(out: jax.Array, kv_heads: int) -> jax.Array:
    """[T, N, G * H] -> [T, N, H]: of each head what stands in the place of its key/value head."""
    tokens, heads, width = out.shape
    of_group = out.reshape(tokens, kv_heads, heads // kv_heads, kv_heads, width // kv_heads)
    own = jnp.stack([of_group[:, head, :, head] for head in range(kv_heads)], axis=1)
    return own.reshape(tokens, heads, width // kv_heads)

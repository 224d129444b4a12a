"""Paged attention over a ragged batch, for any platform: blocks of keys with a running softmax.

Memory is bounded by blocks, not by tokens x context: the softmax is accumulated over key blocks as
in FlashAttention (Dao et al. 2022), and keys are read through the page table as in vLLM's
PagedAttention (Kwon et al. 2023). The number of key blocks is the longest live context, not the
bucket's, so short contexts cost little in a program compiled for long ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.kernel import AttentionKernel, AttentionShape, visible_keys, written_keys
from tbo_jax.attention.rounded import numbers, round_heads
from tbo_jax.attention.work import num_work_items
from tbo_jax.overlap.batch import ForwardBatch

QUERY_BLOCK = 8  # queries of one sequence that a step that prefills computes together
KEY_BLOCK = 64  # keys per block of the running softmax (XLA:CPU: 10 % less step time than 128)


def write_pages(cache: LayerCache, keys: jax.Array, values: jax.Array, batch: ForwardBatch):
    """Store the keys and values of this step's tokens in their sequences' pages.

    Args:
        cache: the layer's pages, of any layout.
        keys, values: [T, G, H]; latent pages hold only the keys, of which the values are a part.
        batch: says where each token stands; padding tokens write nothing.

    Returns:
        The updated `LayerCache`.
    """
    num_pages, page_size, *_ = cache.pages[0].shape
    token = jnp.arange(batch.token_capacity, dtype=jnp.int32)
    live = token < batch.num_tokens
    row = jnp.where(live, batch.sequence_ids, 0)
    position = batch.context_lens[row] + token - batch.cu_query_lens[row]
    column = jnp.where(live, position // page_size, 0)
    page = cache.first_page + batch.page_table[row, column]
    page = jnp.where(live, page, num_pages)  # out of range: dropped
    slot = position % page_size

    def store(pages: jax.Array, new: jax.Array) -> jax.Array:
        flat = new.reshape(new.shape[0], *pages.shape[2:]).astype(pages.dtype)
        return pages.at[page, slot].set(flat, mode="drop")

    new: tuple[jax.Array, ...] = (keys, values)
    if cache.layout == "interleaved":
        new = (jnp.stack([keys, values], axis=2),)
    elif cache.layout == "latent":
        new = (keys,)
    factors: tuple[jax.Array, ...] = ()
    if cache.factors:
        rounded = [round_heads(part, cache.pages[0].dtype) for part in new]
        new = tuple(part for part, _ in rounded)
        factors = tuple(map(store, cache.factors, (of_heads for _, of_heads in rounded)))
    return LayerCache(tuple(map(store, cache.pages, new)), cache.first_page, factors)


@dataclass(frozen=True)
class XlaAttention(AttentionKernel):
    """Attention that XLA compiles for any platform, shape and layout of the pages."""

    key_block: int = KEY_BLOCK

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        return None

    @property
    def ignores_unseen(self) -> bool:
        return True

    @property
    def query_block(self) -> int:
        return QUERY_BLOCK

    def __call__(self, queries, cache, batch, work, *, query_block, **options):
        tokens = queries.shape[0]
        items = num_work_items(batch, query_block)
        own = jax.tree.map(lambda of_each: of_each[:items], work)
        out = self.of_items(queries, cache, batch, own, query_block=query_block, **options)
        token = jnp.arange(tokens, dtype=jnp.int32)
        item = work.token_item[:tokens]
        picked = out[item, jnp.clip(token - own.first_token[item], 0, query_block - 1)]
        return jnp.where((token < batch.num_tokens)[:, None, None], picked, jnp.zeros_like(picked))

    def of_items(
        self, queries, cache, batch, work, *, query_block, scale, sliding_window=None, sinks=None
    ):
        """Attention of each of the W items of `work`: [W, query_block, N, V].

        The arguments are those of a call, but `work` has these items alone.
        """
        tokens, heads, head_dim = queries.shape
        value_dim = self.shape.value_elements
        page_size, kv_heads = cache.page_size, cache.num_kv_heads(head_dim)
        group = heads // kv_heads
        row, first_token = work.row, work.first_token
        num_queries, first_position = work.num_queries, work.first_position
        items = row.shape[0]

        lane = jnp.arange(query_block, dtype=jnp.int32)
        source = jnp.minimum(first_token[:, None] + lane, tokens - 1)
        live = lane < num_queries[:, None]  # [W, Q]
        position = first_position[:, None] + lane  # [W, Q]
        q = queries[source].reshape(items, query_block, kv_heads, group, head_dim)
        q = q.transpose(0, 2, 3, 1, 4).reshape(items, kv_heads, group * query_block, head_dim)
        lowest = (
            jnp.full_like(position, -1) if sliding_window is None else position - sliding_window
        )

        unseen = lowest[:, 0]  # the last key before those of the window
        pages_per_block = max(1, self.key_block // page_size)
        block = pages_per_block * page_size
        spare = -batch.page_table.shape[1] % pages_per_block
        table = jnp.pad(batch.page_table, ((0, 0), (0, spare)))[row] + cache.first_page
        highest = position
        key_end = jnp.where(num_queries > 0, first_position + num_queries, 0)  # [W]
        first, *last = visible_keys(batch) or (None,)
        if first is not None:
            lowest = jnp.maximum(lowest, jnp.maximum(first[source], 0) - 1)
        if last:  # also keys after the item's own
            key_end = written_keys(batch, work, items)
            highest = jnp.minimum(last[0][source], key_end[:, None] - 1)
        num_blocks = jnp.minimum(-(-key_end.max() // block), table.shape[1] // pages_per_block)

        def pages_of(index: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(table, index * pages_per_block, pages_per_block, 1)

        def factors_of(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Of keys and of values, [W, G', 1, block] for G' heads that have one."""
            taken = pages_of(index)
            found = [factors[taken].reshape(items, block, 1, -1) for factors in cache.factors]
            return found[0].transpose(0, 3, 2, 1), found[-1].transpose(0, 3, 2, 1)

        def times_factors(by_head: jax.Array, factors: jax.Array) -> jax.Array:
            """[W, G, rows, block] with a factor for each head and key."""
            split = by_head.reshape(items, factors.shape[1], -1, block)
            return (split * factors).reshape(by_head.shape)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            taken = pages_of(index)
            if cache.layout == "separate":
                keys, values = (pages[taken] for pages in cache.pages)
            else:
                both = cache.pages[0][taken]
                if cache.layout == "interleaved":
                    keys, values = both[..., 0::2, :], both[..., 1::2, :]
                else:
                    keys, values = both, both[..., :value_dim]
            shape = (items, block, kv_heads)
            keys, values = keys.reshape(*shape, head_dim), values.reshape(*shape, value_dim)
            return numbers(keys, queries.dtype), numbers(values, queries.dtype)

        def accumulate(index, state):
            top, total, acc = state
            key_position = index * block + jnp.arange(block, dtype=jnp.int32)
            key, value = read(index)
            scores = jnp.einsum("wgqh,wsgh->wgqs", q, key, preferred_element_type=jnp.float32)
            scores *= scale
            if cache.factors:
                of_keys, of_values = factors_of(index)
                scores = times_factors(scores, of_keys)
            seen = live[:, :, None] & (key_position <= highest[:, :, None])
            seen &= key_position > lowest[:, :, None]
            seen = jnp.broadcast_to(
                seen[:, None, None], (items, 1, group, query_block, block)
            ).reshape(items, 1, group * query_block, block)
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen nothing yet keeps -inf; 0 stands in so that exp gets no inf - inf.
            safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights = jnp.exp(scores - safe[..., None])
            shrink = jnp.exp(top - safe)
            # Unwritten slots may hold anything, NaN too, and 0 * NaN is NaN: zero the values too.
            # The same goes for pages that no query of the item sees any more: others have them.
            written = (key_position < key_end[:, None]) & (key_position > unseen[:, None])
            value = jnp.where(written[:, :, None, None], value, jnp.zeros_like(value))
            of_value = weights
            if cache.factors:
                of_values = jnp.where(written[:, None, None], of_values, 0.0)
                of_value = times_factors(weights, of_values)
            update = jnp.einsum(
                "wgqs,wsgh->wgqh", of_value.astype(value.dtype), value,
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            return new_top, total * shrink + weights.sum(-1), acc * shrink[..., None] + update

        shape = (items, kv_heads, group * query_block)
        top, total = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
        if sinks is not None:  # a softmax starts with its sink, of weight exp(sink - top) = 1
            of_lane = jnp.repeat(sinks.astype(jnp.float32), query_block).reshape(shape[1:])
            top, total = jnp.broadcast_to(of_lane, shape), jnp.ones(shape, jnp.float32)
        start = (top, total, jnp.zeros((*shape, value_dim), jnp.float32))
        # The number of turns is data; the name lets the schedule report assume one.
        with jax.named_scope("key_blocks"):
            _, total, acc = jax.lax.fori_loop(0, num_blocks, accumulate, start)
        out = acc / jnp.where(total == 0, 1.0, total)[..., None]
        out = out.reshape(items, kv_heads, group, query_block, value_dim).transpose(0, 3, 1, 2, 4)
        return out.reshape(items, query_block, heads, value_dim).astype(queries.dtype)


def expected_turns(context: int, page_size: int) -> dict[str, float]:
    """Turns of the loop over key blocks, by its name scope, if the longest context is `context`.

    For the schedule report, which cannot know the contexts.
    """
    block = max(1, KEY_BLOCK // page_size) * page_size
    return {"key_blocks": -(-context // block)}

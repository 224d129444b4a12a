"""Attention work items: which block of queries of which sequence is computed together.

A ragged batch mixes prefill chunks and decode rows. It is cut into blocks of up to `query_block`
queries of one sequence each, so that a kernel sees equal-sized items however long the rows are (the
persistent-tile scheduling of FlashInfer and of FlashAttention's varlen form).
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from tbo_jax.overlap.batch import ForwardBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """Work items of one micro-batch, W = its token slots at most (a block has a token or more)."""

    row: jax.Array  # [W] int32, sequence of the item
    first_token: jax.Array  # [W] int32, index of its first query among the batch's tokens
    num_queries: jax.Array  # [W] int32, 0 for an unused item
    first_position: jax.Array  # [W] int32, position of its first query in its sequence
    token_item: jax.Array  # [W] int32, for every token the item that computes it

    @classmethod
    def zeros(cls, num_ranks: int, max_tokens: int) -> Self:
        """Empty work for `num_ranks` ranks: arrays [num_ranks * max_tokens]."""
        return cls(*(jnp.zeros(num_ranks * max_tokens, jnp.int32) for _ in range(5)))


def num_work_items(batch: ForwardBatch, query_block: int) -> int:
    """Static bound on the items of a batch: each row wastes less than one block."""
    tokens, rows = batch.token_capacity, batch.sequence_capacity
    return min(tokens, tokens // query_block + rows)


def plan_attention(batch: ForwardBatch, query_block: int, buffer: AttentionWork) -> AttentionWork:
    """Write the work items of `batch` into `buffer` (arrays [W], W >= its token slots)."""
    row = jnp.arange(batch.sequence_capacity, dtype=jnp.int32)
    lengths = jnp.where(row < batch.num_sequences, batch.query_lens, 0)
    items_per_row = -(-lengths // query_block)
    item_end = jnp.cumsum(items_per_row, dtype=jnp.int32)
    item_start = item_end - items_per_row

    item = jnp.arange(num_work_items(batch, query_block), dtype=jnp.int32)
    owner = jnp.sum(item_end <= item[:, None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, batch.sequence_capacity - 1)
    offset = (item - item_start[owner]) * query_block
    live = item < item_end[-1]
    num_queries = jnp.where(live, jnp.clip(lengths[owner] - offset, 0, query_block), 0)

    token = jnp.arange(batch.token_capacity, dtype=jnp.int32)
    owner_of_token = jnp.where(token < batch.num_tokens, batch.sequence_ids, 0)
    within = token - batch.cu_query_lens[owner_of_token]
    token_item = jnp.where(
        token < batch.num_tokens, item_start[owner_of_token] + within // query_block, 0
    )

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[: new.shape[0]].set(new)

    return AttentionWork(
        row=write(buffer.row, owner),
        first_token=write(buffer.first_token, batch.cu_query_lens[owner] + offset),
        num_queries=write(buffer.num_queries, num_queries),
        first_position=write(buffer.first_position, batch.context_lens[owner] + offset),
        token_item=write(buffer.token_item, token_item),
    )

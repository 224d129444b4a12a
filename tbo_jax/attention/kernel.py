"""What an attention kernel is: an object that knows its pages, blocks, limits and cost.

A kernel is made for a shape. Adding one takes a file with a subclass of `AttentionKernel` here, and
a line in the table of `step/kernels.py`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.attention.cache import LayerCache, PageLayout
from tbo_jax.attention.rounded import CacheDtype, bytes_of_token
from tbo_jax.attention.work import AttentionWork, plan_attention
from tbo_jax.overlap.batch import ForwardBatch


@dataclass(frozen=True)
class AttentionShape:
    """What is to be computed, of one device."""

    heads: int  # N, of the queries
    kv_heads: int  # G, of the keys and values
    head_dim: int  # H, elements of a query and of a key
    dtype: Any
    value_dim: int | None = None  # V of latent pages: the elements of a key that are its value
    sinks: bool = False  # whether every head has one
    masked: bool = False  # whether batches have `mask_offsets`
    cache_dtype: CacheDtype | None = None  # of the pages; None: `dtype`

    @property
    def latent(self) -> bool:
        """Whether values are a part of the keys."""
        return self.value_dim is not None

    @property
    def group(self) -> int:
        """Heads of queries that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def cached_elements(self) -> int:
        """What the cache of one layer holds of a token."""
        return self.kv_heads * self.head_dim * (1 if self.latent else 2)

    @property
    def cached_bytes(self) -> int:
        """Bytes of that, and of the factors of 8 bits."""
        heads = self.kv_heads * (1 if self.latent else 2)
        width = jnp.dtype(self.dtype).itemsize
        return bytes_of_token(self.cached_elements, heads, width, self.cache_dtype)

    @property
    def value_elements(self) -> int:
        """V, elements of a head of the result."""
        return self.head_dim if self.value_dim is None else self.value_dim


def visible_keys(batch: ForwardBatch) -> tuple[jax.Array, ...]:
    """What `mask_offsets` say: nothing, or of each token the first key [T], or first and last."""
    if batch.mask_offsets is None:
        return ()
    if batch.mask_offsets.shape[-1] == batch.token_capacity:
        return (batch.mask_offsets,)
    first, last = batch.mask_offsets.reshape(-1, 2).T
    return first, last


def written_keys(batch: ForwardBatch, work: AttentionWork, items: int) -> jax.Array:
    """[items] int32: the keys of each work item's sequence that are in the cache; 0 if unused."""
    row = work.row[:items]
    ends = batch.context_lens[row] + batch.query_lens[row]
    return jnp.where(work.num_queries[:items] > 0, ends, 0)


@dataclass(frozen=True)
class AttentionLoad:
    """What a micro-batch asks of the attention of a layer, for the schedule report."""

    tokens: int
    context: int  # tokens of each sequence; decode has a token of each, prefill all of them
    seen: int  # the same for a kernel that skips what a window hides, mean over the layers
    decode: bool


@dataclass(frozen=True)
class AttentionKernel(abc.ABC):
    """Causal attention of a ragged batch to its pages, for one shape."""

    shape: AttentionShape

    @classmethod
    @abc.abstractmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        """Why the kernel cannot run this shape on devices like `device`; None if it can."""

    @property
    def layout(self) -> PageLayout:
        """How it wants the pages to lie."""
        return "latent" if self.shape.latent else "separate"

    @property
    def ignores_unseen(self) -> bool:
        """Whether pages before the window of a sequence's queries may hold anything, NaN too."""
        return False

    @property
    @abc.abstractmethod
    def query_block(self) -> int:
        """Queries of one sequence that a step that prefills computes together."""

    def plan(self, batch: ForwardBatch, query_block: int, buffer: AttentionWork) -> AttentionWork:
        """The work items of a batch, written into `buffer`; see `plan_attention`."""
        return plan_attention(batch, query_block, buffer)

    @abc.abstractmethod
    def __call__(
        self,
        queries: jax.Array,
        cache: LayerCache,
        batch: ForwardBatch,
        work: AttentionWork,
        *,
        query_block: int,
        scale: float,
        sliding_window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of each token to its sequence's keys, its own included.

        Args:
            queries: [T, N, H] of the shape's dtype.
            cache: pages of this kernel's layout that hold the keys and values of this step's tokens
                already.
            batch, work: the batch and what `plan` made of it for `query_block` queries each. Its
                `mask_offsets` say which keys a token sees; without, those up to its own.
            query_block: queries of a sequence that are computed together.
            scale: factor of the scores.
            sliding_window: a token sees itself and the `sliding_window - 1` keys before it.
            sinks: [N], of each head a score that every softmax has one of beside those of the keys,
                and that has no value (gpt-oss; Xiao et al. 2023 on what sinks do).

        Returns:
            [T, N, V] in the dtype of `queries`; rows of padding tokens are zero. V = H, or with
            latent pages the `value_dim` of the shape.
        """

    def expected_work(self, load: AttentionLoad) -> dict[str, tuple[float, float]]:
        """Floating-point operations and bytes, by the name that XLA's text has for the kernel.

        Empty for what XLA computes, whose text tells them.
        """
        return {}

    @property
    def _width(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.shape.dtype).itemsize

"""What a layer is given besides its weights and its input: one object per micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.kernel import AttentionKernel
from tbo_jax.attention.paged import write_pages
from tbo_jax.attention.work import AttentionWork
from tbo_jax.moe.experts import apply_experts
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.parallel.exchange import Exchange
from tbo_jax.parallel.tensor_parallel import ONE_DEVICE, TensorParallel


class Attention(Protocol):
    """Attention of a micro-batch, with whatever cache it keeps."""

    def __call__(
        self,
        queries,
        keys,
        values,
        cache,
        *,
        scale: float,
        sliding_window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """[T, N, H], [T, G, H], [T, G, V], cache -> [T, N, V], cache.

        Values are as large as keys, V = H, or the first V elements of the keys (latent attention).
        For the options see `AttentionKernel`.
        """


@dataclass(frozen=True)
class PagedAttention:
    """Decode and prefill: keys and values go to pages, queries read them there."""

    batch: ForwardBatch
    work: AttentionWork
    query_block: int
    kernel: AttentionKernel

    def __call__(self, queries, keys, values, cache, **options):
        cache = write_pages(cache, keys, values, self.batch)
        out = self.kernel(
            queries, cache, self.batch, self.work, query_block=self.query_block, **options
        )
        return out, cache


@dataclass(frozen=True)
class DenseAttention:
    """Training: sequences of `length` tokens one after another, no cache."""

    length: int
    attend: Callable[..., jax.Array] = dense_causal_attention  # or a kernel that does the same

    def __call__(self, queries, keys, values, cache, **options):
        out = self.attend(queries, keys, values, length=self.length, **options)
        return out, cache


@dataclass(frozen=True)
class LayerContext:
    """Context of the layers in `layers/` for one micro-batch of T tokens."""

    attention: Attention
    exchange: Exchange
    rotary: tuple[jax.Array, jax.Array]  # cos, sin: [T, rotated dimensions / 2] float32
    live: jax.Array  # [T] bool, false for padding
    tensor: TensorParallel = ONE_DEVICE
    experts: Callable[..., jax.Array] = apply_experts  # see `moe.experts.apply_experts`


def live_tokens(batch: ForwardBatch) -> jax.Array:
    """[T] bool, which token slots hold a token."""
    return jnp.arange(batch.token_capacity) < batch.num_tokens

"""Dense causal attention over equally long sequences, differentiable: for training."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dense_causal_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    length: int,
    scale: float,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within each of T / length sequences laid out one after another.

    Args:
        queries: [T, N, H]; keys: [T, G, H]; values: [T, G, V]; T a multiple of `length`.
        length: tokens of each sequence.
        scale: factor of the scores.
        sliding_window: a token sees itself and the `sliding_window - 1` keys before it.
        sinks: see `AttentionKernel`.

    Returns:
        [T, N, V].
    """
    tokens, heads, head_dim = queries.shape
    _, kv_heads, value_dim = values.shape
    q = queries.reshape(-1, length, kv_heads, heads // kv_heads, head_dim)
    k = keys.reshape(-1, length, kv_heads, head_dim)
    v = values.reshape(-1, length, kv_heads, value_dim)
    scores = jnp.einsum("bqgnh,bsgh->bgnqs", q, k, preferred_element_type=jnp.float32) * scale
    at = jnp.arange(length)
    seen = at[None, :] <= at[:, None]
    if sliding_window is not None:
        seen &= at[None, :] > at[:, None] - sliding_window
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:  # a column more, without a value
        sink = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(v.dtype)
    return jnp.einsum("bgnqs,bsgh->bqgnh", weights, v).reshape(tokens, heads, value_dim)

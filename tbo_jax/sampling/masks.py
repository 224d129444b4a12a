"""Which tokens each row of a step's logits may become."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mask_logits(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """The logits with -inf for what is not allowed; NaN and +inf stay detectable.

    A row that allows everything keeps its logits bit for bit.

    Args:
        logits: [B, V], any float type.
        allowed: [B, ceil(V / 32)] int32: bit i % 32 of number i // 32 is that of token i.

    Returns:
        [B, V] of the same type.
    """
    rows, vocabulary = logits.shape
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
    bits = bits.reshape(rows, -1)[:, :vocabulary]
    # Added, not put in place of the logit: what is not finite stays so.
    return jnp.where(bits > 0, logits, logits + jnp.asarray(-jnp.inf, logits.dtype))

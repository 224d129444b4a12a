"""The experts of one device applied to the rows that reached it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tbo_jax.moe.grouped_matmul import grouped_matmul


def apply_experts(
    rows: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Weighted sum, for each row, of the gated (SwiGLU) experts of this device that it chose.

    Args:
        rows: [M, D].
        experts: [M, K] int32, index among this device's experts; anything outside [0, E) is an
            expert of another device, or none, and adds nothing.
        weights: [M, K].
        gate_up: [E, D, 2F], gate projection first.
        down: [E, F, D].

    Returns:
        [M, D], zero for rows without an expert here.
    """
    num_rows, top_k = experts.shape
    num_experts = gate_up.shape[0]
    chosen = experts.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)
    order = jnp.argsort(chosen)
    group_sizes = jnp.sum(chosen[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    # A row has at most min(K, E) experts here: what is sorted behind that bound belongs elsewhere.
    bound = num_rows * min(top_k, num_experts)
    hidden = grouped_matmul(rows[order[:bound] // top_k], gate_up, group_sizes)
    gate, up = jnp.split(hidden, 2, axis=-1)
    out = grouped_matmul(jax.nn.silu(gate) * up, down, group_sizes)
    place = jnp.argsort(order).reshape(num_rows, top_k)
    here = (chosen < num_experts).reshape(num_rows, top_k)
    picked = out[jnp.minimum(place, bound - 1)]
    weights = jnp.where(here, weights, jnp.zeros_like(weights))
    return jnp.einsum("mkd,mk->md", picked, weights)

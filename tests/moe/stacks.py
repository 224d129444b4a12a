"""Expert weights as a part of those of all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tbo_jax.moe.expert_weights import ExpertWeights


def between_others(gate_up: jax.Array, down: jax.Array) -> ExpertWeights:
    """The experts as the second of three layers, whose other weights are NaN."""

    def stack(own: jax.Array) -> jax.Array:
        others = jnp.full_like(own, jnp.nan)
        return jnp.stack([others, own, others])

    return ExpertWeights.of_layer(stack(gate_up), stack(down), jnp.int32(1))

"""What a gated expert makes of its gate and up projections."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class SwiGlu:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, after clamping.

    The defaults are SwiGLU (Shazeer 2020). gpt-oss (model card, 2025) has alpha 1.702, limit 7 and
    offset 1. Works inside Pallas kernels.
    """

    alpha: float = 1.0
    limit: float | None = None  # of the gate from above, and of up on both sides
    up_offset: float = 0.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Elementwise."""
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.maximum(jnp.minimum(up, self.limit), -self.limit)
        gated = gate * jax.nn.sigmoid(gate if self.alpha == 1 else self.alpha * gate)
        return gated * (up + self.up_offset if self.up_offset else up)

"""Expert weights as a part of those of all layers, and what gated experts compute, in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.expert_weights import ExpertWeights

CLAMPED = SwiGlu(alpha=1.702, limit=0.75, up_offset=1.0)


def between_others(*arrays: jax.Array, activation: SwiGlu = SwiGlu()) -> ExpertWeights:  # noqa: B008
    """The experts as the second of three layers, whose other weights are NaN."""

    def stack(own: jax.Array) -> jax.Array:
        others = jnp.full_like(own, jnp.nan)
        return jnp.stack([others, own, others])

    return ExpertWeights(*map(stack, arrays), activation=activation).of_layer(jnp.int32(1))


def one_by_one(rows: Any, ids: Any, weights: Any, gate_up: Any, down: Any, *biases: Any) -> Any:
    """[M, D] float32, choice by choice; with the two biases the activation is `CLAMPED`."""
    rows, weights, gate_up, down, *biases = (
        np.asarray(x).astype(np.float32) for x in (rows, weights, gate_up, down, *biases)
    )
    of_gate_up, of_down = biases or (np.zeros(len(down)),) * 2
    out = np.zeros_like(rows)
    for row, choice in np.argwhere((ids >= 0) & (ids < len(down))):
        expert = ids[row, choice]
        gate, up = np.split(rows[row] @ gate_up[expert] + of_gate_up[expert], 2)
        if biases:
            gate, up = np.minimum(gate, 0.75), np.clip(up, -0.75, 0.75)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        else:
            hidden = gate / (1 + np.exp(-gate)) * up
        out[row] += weights[row, choice] * (hidden @ down[expert] + of_down[expert])
    return out

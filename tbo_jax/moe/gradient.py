"""What kernels for experts with a gradient have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.moe.expert_weights import ExpertWeights

Forward = Callable[[jax.Array, jax.Array, jax.Array, ExpertWeights], jax.Array]
Backward = Callable[
    [jax.Array, jax.Array, jax.Array, ExpertWeights, jax.Array],
    tuple[jax.Array, jax.Array, ExpertWeights],
]


def apply_with_gradient(
    forward: Forward,
    backward: Backward,
    rows: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    matrices: ExpertWeights,
) -> jax.Array:
    """`forward` of the other arguments, differentiable in all but the choices.

    The backward pass keeps nothing but what the forward pass was given.

    Args:
        forward: takes and gives what `experts.apply_experts` does.
        backward: takes the same, `matrices` in arrays of their own, and the gradient of the result;
            gives the gradients of rows, weights and matrices.
        rows, experts, weights, matrices: as `experts.apply_experts` takes them.
    """
    first = matrices.first
    rows, experts, weights = map(jnp.asarray, (rows, experts, weights))

    @jax.custom_vjp
    def apply(rows, weights, arrays, experts, first):
        return forward(rows, experts, weights, replace(arrays, first=first))

    def keep(rows, weights, arrays, experts, first):
        return apply(rows, weights, arrays, experts, first), (rows, weights, arrays, experts, first)

    def transpose(saved, grad):
        rows, weights, arrays, experts, first = saved
        # Of a stack of layers the gradient is zero but for this layer's part.
        own, of_stack = jax.vjp(lambda a: replace(a, first=first).sliced(), arrays)
        of_rows, of_weights, of_own = backward(rows, experts, weights, own, grad)
        (of_arrays,) = of_stack(of_own)
        no_ids = np.zeros(experts.shape, jax.dtypes.float0)
        no_first = None if first is None else np.zeros((), jax.dtypes.float0)
        return of_rows, of_weights, of_arrays, no_ids, no_first

    apply.defvjp(keep, transpose)
    return apply(rows, weights, replace(matrices, first=None), experts, first)

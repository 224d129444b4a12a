"""The experts of one device applied to the rows that reached it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.grouped_matmul import for_each_block, grouped_matmul


def apply_experts(
    rows: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    matrices: ExpertWeights,
) -> jax.Array:
    """Weighted sum, for each row, of the gated (SwiGLU) experts of this device that it chose.

    Args:
        rows: [M, D].
        experts: [M, K] int32, index among this device's experts; anything outside [0, E) is an
            expert of another device, or none, and adds nothing. A row names an expert once.
        weights: [M, K].
        matrices: of E experts of widths D and F.

    Returns:
        [M, D], zero for rows without an expert here.
    """
    num_rows, top_k = experts.shape
    num_experts = matrices.num_experts
    chosen = experts.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)
    order = jnp.argsort(chosen)
    group_sizes = jnp.sum(chosen[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    # A row has at most min(K, E) experts here: what is sorted behind that bound belongs elsewhere.
    bound = num_rows * min(top_k, num_experts)
    out = grouped_swiglu(rows[order[:bound] // top_k], matrices, group_sizes)
    place = jnp.argsort(order).reshape(num_rows, top_k)
    here = (chosen < num_experts).reshape(num_rows, top_k)
    picked = out[jnp.minimum(place, bound - 1)]
    # Both are masked: a row that is not of this token may hold a NaN, and 0 * NaN is NaN.
    picked = jnp.where(here[:, :, None], picked, jnp.zeros_like(picked))
    weights = jnp.where(here, weights, jnp.zeros_like(weights))
    return jnp.einsum("mkd,mk->md", picked, weights)


@jax.custom_vjp
def grouped_swiglu(rows: jax.Array, matrices: ExpertWeights, group_sizes: jax.Array) -> jax.Array:
    """Rows of group e through expert e: `(silu(x @ gate) * (x @ up)) @ down`.

    Both products of a block are in one loop body: half the loops to compile, and no intermediate of
    all rows.

    Args:
        rows: [M, D], sorted by group.
        matrices: of E experts.
        group_sizes: [E] int32, with a sum of at most M.

    Returns:
        [M, D]; rows past the last group are zero. Differentiable but in `group_sizes`.
    """

    def block(out, start, group, count):
        x = jax.lax.dynamic_slice_in_dim(rows, start, count)
        gate_up, down = (
            stack[matrices.place(group)] for stack in (matrices.gate_up, matrices.down)
        )
        hidden = _swiglu(jnp.dot(x, gate_up, preferred_element_type=jnp.float32))
        product = jnp.dot(hidden.astype(x.dtype), down, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), start, 0)

    return for_each_block(block, jnp.zeros_like(rows), group_sizes, rows.shape[0])


def _swiglu(hidden: jax.Array) -> jax.Array:
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _forward(rows, matrices, group_sizes):
    return grouped_swiglu(rows, matrices, group_sizes), (rows, matrices, group_sizes)


def _backward(saved, grad):
    rows, matrices, group_sizes = saved

    def in_two_steps(rows, gate_up, down):
        own = replace(matrices, gate_up=gate_up, down=down).sliced()
        hidden = _swiglu(grouped_matmul(rows, own.gate_up, group_sizes))
        return grouped_matmul(hidden, own.down, group_sizes)

    _, transpose = jax.vjp(in_two_steps, rows, matrices.gate_up, matrices.down)
    rows_grad, gate_up, down = transpose(grad)
    return rows_grad, replace(matrices, gate_up=gate_up, down=down, first=None), None


grouped_swiglu.defvjp(_forward, _backward)

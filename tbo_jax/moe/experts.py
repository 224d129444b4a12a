"""The experts of one device applied to the rows that reached it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.grouped_matmul import (
    expected_turns,
    for_each_block,
    for_each_equal_block,
    grouped_matmul,
    zeros,
)
from tbo_jax.moe.kernel import ExpertKernel, ExpertLoad, ExpertShape
from tbo_jax.quantized.array import times


def apply_experts(
    rows: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    matrices: ExpertWeights,
    block_rows: int | None = None,
) -> jax.Array:
    """Weighted sum, for each row, of the gated experts of this device that it chose.

    Args:
        rows: [M, D].
        experts: [M, K] int32, index among this device's experts; anything outside [0, E) is an
            expert of another device, or none, and adds nothing. A row names an expert once.
        weights: [M, K].
        matrices: of E experts of widths D and F.
        block_rows: compute so many rows together whatever the choices of others; None: as is
            fastest for them. With it there is no gradient.

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
    sorted_rows = rows[order[:bound] // top_k]
    if block_rows is None:
        out = grouped_experts(sorted_rows, matrices, group_sizes)
    else:
        out = _in_equal_blocks(sorted_rows, matrices, group_sizes, block_rows)
    place = jnp.argsort(order).reshape(num_rows, top_k)
    here = (chosen < num_experts).reshape(num_rows, top_k)
    picked = out[jnp.minimum(place, bound - 1)]
    # Both are masked: a row that is not of this token may hold a NaN, and 0 * NaN is NaN.
    picked = jnp.where(here[:, :, None], picked, jnp.zeros_like(picked))
    weights = jnp.where(here, weights, jnp.zeros_like(weights))
    return jnp.einsum("mkd,mk->md", picked, weights)


@dataclass(frozen=True)
class XlaExperts(ExpertKernel):
    """`apply_experts`, which XLA compiles for any platform and shape."""

    block_rows: int | None = None

    @classmethod
    def unsupported(cls, shape: ExpertShape, device: Any = None) -> str | None:
        return None

    def __call__(self, rows, experts, weights, matrices):
        return apply_experts(rows, experts, weights, matrices, self.block_rows)

    def expected_turns(self, load: ExpertLoad) -> dict[str, float]:
        return expected_turns(load.chosen / load.num_experts, load.num_experts, load.bound)


@jax.custom_vjp
def grouped_experts(rows: jax.Array, matrices: ExpertWeights, group_sizes: jax.Array) -> jax.Array:
    """Rows of group e through expert e, see `ExpertWeights`.

    Both products of a block are in one loop body: half the loops to compile, and no intermediate of
    all rows.

    Args:
        rows: [M, D], sorted by group.
        matrices: of E experts.
        group_sizes: [E] int32, with a sum of at most M.

    Returns:
        [M, D]; rows past the last group are zero. Differentiable but in `group_sizes`.
    """

    block = _product_of_block(rows, matrices)
    return for_each_block(block, zeros(rows.shape, rows.dtype, rows), group_sizes, rows.shape[0])


def _in_equal_blocks(
    rows: jax.Array, matrices: ExpertWeights, group_sizes: jax.Array, count: int
) -> jax.Array:
    """`grouped_experts` by blocks of `count` rows; what it gives past the last group is undefined.

    No row's bits depend on the others.
    """
    padded = jnp.pad(rows, ((0, count), (0, 0)))
    out = zeros(padded.shape, rows.dtype, rows)
    block = _product_of_block(padded, matrices)
    return for_each_equal_block(block, out, group_sizes, count)[: rows.shape[0]]


def _product_of_block(rows: jax.Array, matrices: ExpertWeights) -> Callable[..., jax.Array]:
    """What a loop over blocks of the rows does in a turn."""

    def block(out, start, group, count):
        x = jax.lax.dynamic_slice_in_dim(rows, start, count)
        place = matrices.place(group)

        def project(x, stack, bias):
            product = times(x, stack[place])
            return product if bias is None else product + bias[place].astype(jnp.float32)

        hidden = _activate(matrices, project(x, matrices.gate_up, matrices.gate_up_bias))
        product = project(hidden.astype(x.dtype), matrices.down, matrices.down_bias)
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), start, 0)

    return block


def _activate(matrices: ExpertWeights, hidden: jax.Array) -> jax.Array:
    return matrices.activation(*jnp.split(hidden, 2, axis=-1))


def _forward(rows, matrices, group_sizes):
    return grouped_experts(rows, matrices, group_sizes), (rows, matrices, group_sizes)


def _backward(saved, grad):
    rows, matrices, group_sizes = saved

    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0]), side="right")

    def project(x, stack, bias):
        product = grouped_matmul(x, stack, group_sizes)
        if bias is None:
            return product
        # Rows past the last group have none.
        return product + bias.astype(x.dtype).at[group].get(mode="fill", fill_value=0)

    def in_two_steps(rows, arrays):
        own = replace(arrays, first=matrices.first).sliced()
        hidden = _activate(own, project(rows, own.gate_up, own.gate_up_bias))
        return project(hidden, own.down, own.down_bias)

    _, transpose = jax.vjp(in_two_steps, rows, replace(matrices, first=None))
    return (*transpose(grad), None)


grouped_experts.defvjp(_forward, _backward)

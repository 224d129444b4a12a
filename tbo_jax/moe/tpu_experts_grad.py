"""Gated experts on TPU with a gradient: the kernels of `tpu_experts`, and JAX's grouped products.

The backward pass goes over the same chunks of choices. It keeps nothing but what the forward pass
was given, and computes the projections of gate and up anew: kept, they would take 2F numbers for
each choice that could be of this device. Its six products are those of
`jax.experimental.pallas.ops.tpu.megablox` (after MegaBlocks, Gale et al. 2023), which read weights
in place, also transposed. What `tpu_experts` has against them for decoding, some 70 small
operations a call, is nothing beside the rows of a training step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.gradient import apply_with_gradient
from tbo_jax.moe.kernel import ExpertLoad
from tbo_jax.moe.tpu_experts import (
    CHUNKS,
    ROW_TILE,
    TpuExperts,
    _add_up,
    _sort_by_expert,
    _visit,
    chunk_rows,
)

# Of tiles of the grouped products, which have 16 MiB of fast memory. Those of the outer products,
# float32 in three buffers, are narrower.
MOST_ROWS, MOST_COLUMNS, OUTER_COLUMNS = 512, 1024, 512


@dataclass(frozen=True)
class DifferentiableTpuExperts(TpuExperts):
    """`TpuExperts`, differentiable in all but the choices: for training."""

    def __call__(self, rows, experts, weights, matrices):
        return apply_with_gradient(
            super().__call__, self._backward, rows, experts, weights, matrices
        )

    def _backward(self, rows, experts, weights, matrices, grad):
        """The gradients of rows, weights of the choices, and matrices, from that of the result."""
        num_rows, top_k = experts.shape
        num_experts = matrices.num_experts
        bound = num_rows * min(top_k, num_experts)
        chunk = chunk_rows(num_rows, bound)
        size = -(-bound // chunk) * chunk
        choices, scales, ends = _sort_by_expert(experts, weights, num_experts, size)
        row_tiles = -(-num_rows // ROW_TILE)
        grad = grad.astype(rows.dtype)

        def add(number: jax.Array, sums: _Sums) -> _Sums:
            start = number * chunk
            choice, scale = (
                jax.lax.dynamic_slice_in_dim(a, start, chunk) for a in (choices, scales)
            )
            of_chunk = jnp.clip(ends - start, 0, chunk)
            row = jnp.minimum(choice // top_k, num_rows - 1)
            # Behind the last choice nothing is computed, and anything may stand.
            is_live = (jnp.arange(chunk) < of_chunk[-1])[:, None]
            of_choice, of_scale, of_matrices = self._of_chunk(
                rows[row], grad[row], scale[:, None], is_live, of_chunk, matrices
            )
            of_scales = jax.lax.dynamic_update_slice_in_dim(sums.of_scales, of_scale, start, 0)
            # In the order of their rows, so that those of a tile of rows are neighbours.
            place = jnp.arange(chunk, dtype=jnp.int32)
            choice, place = jax.lax.sort((choice, place), num_keys=1, is_stable=False)
            tile_end = (jnp.arange(row_tiles, dtype=jnp.int32) + 1) * (ROW_TILE * top_k)
            tile_end = jnp.minimum(tile_end, num_rows * top_k)  # behind it: nobody's
            visits = _visit(
                jnp.sum(choice < tile_end[:, None], axis=1, dtype=jnp.int32), chunk, empty=True
            )
            of_rows = _add_up(
                visits, choice // top_k, jnp.ones(chunk, jnp.float32), of_choice[place],
                sums.of_rows, self.interpret,
            )  # fmt: skip
            added = jax.tree.map(jnp.add, sums.of_matrices, of_matrices)
            return _Sums(of_rows, of_scales, added)

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), matrices)
        of_rows = jnp.zeros((row_tiles * ROW_TILE, rows.shape[1]), jnp.float32)
        with jax.named_scope(CHUNKS):
            sums = _Sums(of_rows, jnp.zeros(size, jnp.float32), zeros)
            sums = jax.lax.fori_loop(0, -(-ends[-1] // chunk), add, sums)
        # Each live choice has its place in the order; the others say M * K, which is none.
        of_weights = jnp.zeros(num_rows * top_k, jnp.float32)
        of_weights = of_weights.at[choices].add(sums.of_scales, mode="drop")
        of_matrices = jax.tree.map(lambda s, a: s.astype(a.dtype), sums.of_matrices, matrices)
        return (
            sums.of_rows[:num_rows].astype(rows.dtype),
            of_weights.reshape(experts.shape).astype(weights.dtype),
            of_matrices,
        )

    def _of_chunk(self, taken, grad, scale, is_live, ends, matrices):
        """Gradients of a chunk's choices [C, D], of their weights [C], and of the matrices.

        Args:
            taken, grad: [C, D], of each choice its row, and the gradient of that row's result.
            scale: [C, 1], the choices' weights.
            is_live: [C, 1], whether a choice is one.
            ends: [E], where each expert's choices end.
            matrices: of the experts.
        """
        sizes = jnp.diff(ends, prepend=0)
        product = functools.partial(_product, sizes=sizes, interpret=self.interpret)
        outer = functools.partial(_outer, sizes=sizes, interpret=self.interpret)
        expert = jnp.sum(jnp.arange(len(taken))[:, None] >= ends, axis=1)
        expert = jnp.minimum(expert, len(ends) - 1)

        def live(x: jax.Array) -> jax.Array:
            return jnp.where(is_live, x, 0)

        def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
            return x if bias is None else x + bias[expert].astype(jnp.float32)

        hidden = live(biased(product(taken, matrices.gate_up), matrices.gate_up_bias))
        activated, transpose = jax.vjp(matrices.activation, *jnp.split(hidden, 2, axis=1))
        of_activated = live(product(grad, matrices.down, transposed=True))
        of_scale = jnp.sum(activated * of_activated, axis=1)
        if matrices.down_bias is not None:
            of_bias = grad.astype(jnp.float32) * matrices.down_bias[expert].astype(jnp.float32)
            of_scale += live(of_bias).sum(axis=1)
        of_hidden = jnp.concatenate(transpose(of_activated * scale), axis=1)
        rounded = of_hidden.astype(taken.dtype)
        of_choice = product(rounded, matrices.gate_up, transposed=True).astype(taken.dtype)
        of_down = outer((activated * scale).astype(taken.dtype), grad)
        of_matrices = replace(matrices, gate_up=outer(taken, rounded), down=of_down)
        if matrices.gate_up_bias is not None:
            one_hot = live(jax.nn.one_hot(expert, len(ends), dtype=jnp.float32))
            summed = functools.partial(jnp.einsum, "ce,cf->ef", precision="highest")
            of_matrices = replace(
                of_matrices,
                gate_up_bias=summed(one_hot, of_hidden),
                down_bias=summed(one_hot, scale * live(grad.astype(jnp.float32))),
            )
        return of_choice, of_scale, of_matrices

    def expected_work(self, load: ExpertLoad) -> dict[str, tuple[float, float]]:
        """Those of the forward pass; XLA's text tells the others."""
        return {}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["of_rows", "of_scales", "of_matrices"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _Sums:
    of_rows: jax.Array  # [M, D] float32
    of_scales: jax.Array  # [C of all chunks] float32, in the order of the choices
    of_matrices: ExpertWeights  # float32


def _product(
    lhs: jax.Array,
    weights: jax.Array,
    *,
    sizes: jax.Array,
    transposed: bool = False,
    interpret: bool,
) -> jax.Array:
    """[C, I], [E, I, J] (or [E, J, I]) -> [C, J] float32, each group of rows with its matrix."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    inner, columns = weights.shape[1:][:: -1 if transposed else 1]
    tiling = _tiling(len(lhs), inner, min(columns, MOST_COLUMNS))
    with jax.numpy_dtype_promotion("standard"):  # JAX's own code is not made for "strict"
        return gmm(
            lhs, weights, sizes, jnp.float32, tiling, transpose_rhs=transposed, interpret=interpret
        )


def _outer(lhs: jax.Array, rhs: jax.Array, *, sizes: jax.Array, interpret: bool) -> jax.Array:
    """[C, I], [C, J] -> [E, I, J] float32: of each group the sum over its rows."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = _tiling(len(lhs), lhs.shape[1], min(rhs.shape[1], OUTER_COLUMNS))
    with jax.numpy_dtype_promotion("standard"):
        return tgmm(lhs.T, rhs, sizes, jnp.float32, tiling, interpret=interpret)


def _tiling(rows: int, inner: int, columns: int) -> tuple[int, int, int]:
    tile = next(n for n in (MOST_ROWS, MOST_ROWS // 2, ROW_TILE) if rows % n == 0)
    return tile, min(inner, MOST_COLUMNS), columns

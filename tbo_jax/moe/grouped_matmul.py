"""Grouped matrix product: rows sorted by group, each multiplied by its group's matrix.

`jax.lax.ragged_dot` on CPU and on XLA:GPU (jax 0.10) multiplies all rows by all groups, so its cost
grows with the number of experts. The block-wise product here does each row once, or up to twice:
a group of n rows is covered by blocks of the largest power of four that fits in it, the last block
shifted back to end with the group, and recomputed rows overwrite themselves. Nothing is padded to
a block size, hence 64 experts with a few rows each cost what 8 experts with many rows do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BLOCK_ROWS = (1, 4, 16, 64)  # sizes of a block; one compiled loop for each
# Where groups are large, as in training: a GPU reads a whole matrix for every block.
LARGE_BLOCK_ROWS = (256, 1024)


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows of group e times `rhs[e]`.

    Args:
        lhs: [M, K], rows of group 0 first, then of group 1, ...
        rhs: [E, K, N].
        group_sizes: [E] int32, with a sum of at most M.

    Returns:
        [M, N] in the dtype of `lhs`; rows past the last group are zero. Differentiable in `lhs`
        and `rhs`.
    """
    return _grouped_matmul(lhs, rhs, jnp.asarray(group_sizes))


@jax.custom_vjp
def _grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _product(lhs, rhs, group_sizes, 0)


def _product(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, summed: int) -> jax.Array:
    """Sums over dimension `summed` of the matrices [K, N]; 1 saves a transpose of them all."""

    def block(out, start, group, rows):
        taken = jax.lax.dynamic_slice_in_dim(lhs, start, rows)
        product = jax.lax.dot_general(
            taken, rhs[group], (((1,), (summed,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), start, 0)

    out = zeros((lhs.shape[0], rhs.shape[2 - summed]), lhs.dtype, lhs)
    return for_each_block(block, out, group_sizes, lhs.shape[0])


def _forward(lhs, rhs, group_sizes):
    return _grouped_matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(saved, grad):
    lhs, rhs, group_sizes = saved
    lhs_grad = _product(grad.astype(lhs.dtype), rhs, group_sizes, 1)
    return lhs_grad, grouped_outer(lhs, grad, group_sizes).astype(rhs.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def grouped_outer(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """For each group the product of its rows, `lhs[rows].T @ rhs[rows]`, in float32.

    [M, K], [M, N] -> [E, K, N]. The gradient of `grouped_matmul` with respect to its matrices.
    """
    group_end = jnp.cumsum(group_sizes)

    def block(out, start, group, rows):
        a = jax.lax.dynamic_slice_in_dim(lhs, start, rows)
        b = jax.lax.dynamic_slice_in_dim(rhs, start, rows)
        # A block shifted back overlaps the one before it; those rows are counted there already.
        # All other blocks start at multiples of their size from the group's start.
        first = group_end[group] - group_sizes[group]
        fresh = jnp.arange(rows) >= -(start - first) % rows
        a = jnp.where(fresh[:, None], a, jnp.zeros_like(a))
        product = jnp.dot(a.T, b, preferred_element_type=jnp.float32)
        return out.at[group].add(product)

    out = zeros((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), jnp.float32, rhs)
    return for_each_block(block, out, group_sizes, lhs.shape[0])


def zeros(shape: tuple[int, ...], dtype: Any, after: jax.Array) -> jax.Array:
    """Zeros that XLA does not write before `after` is there.

    Of constants it makes one: XLA:GPU wrote those for all loops of a step before the first one, and
    kept them all, 12 GB for two layers of training of Qwen3-30B-A3B on 8 devices.
    """
    if not after.size:
        return jnp.zeros(shape, dtype)
    first = after[(0,) * after.ndim]
    bits = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * after.dtype.itemsize}"))
    positive = (bits >> 1).astype(jnp.int32)  # which XLA does not know
    return jnp.full(shape, jnp.minimum(positive, 0).astype(dtype))


def for_each_block(
    block: Callable[..., Any], out: jax.Array, group_sizes: jax.Array, num_rows: int
) -> jax.Array:
    """Fold `block(out, start, group, rows)` over the blocks that cover all groups.

    One loop per block size, each over the groups whose largest fitting block it is. The trip count
    is the number of blocks that exist, so empty groups and padding cost nothing. (One loop with a
    `switch` over the sizes copies `out` in every turn: 5x slower at 8,192 rows.)
    """
    group_end = jnp.cumsum(group_sizes)
    sizes = block_sizes(num_rows, group_sizes.shape[0])
    for rows, larger in zip(sizes, [*sizes[1:], num_rows + 1], strict=False):
        mine = (group_sizes >= rows) & (group_sizes < larger)
        blocks = jnp.where(mine, -(-group_sizes // rows), 0)
        block_end = jnp.cumsum(blocks)

        def body(index, out, rows=rows, blocks=blocks, block_end=block_end):
            group = jnp.sum(block_end <= index)
            within = index - (block_end[group] - blocks[group])
            start = group_end[group] - group_sizes[group] + within * rows
            return block(out, jnp.minimum(start, group_end[group] - rows), group, rows)

        # The number of turns is data; the name lets the schedule report assume one.
        with jax.named_scope(f"expert_blocks_{rows}"):
            out = jax.lax.fori_loop(0, block_end[-1], body, out)
    return out


def for_each_equal_block(
    block: Callable[..., Any], out: jax.Array, group_sizes: jax.Array, rows: int
) -> jax.Array:
    """What `for_each_block` does, by blocks of one size: a row is computed alike in any group.

    A product of other sizes may sum in another order, so with `for_each_block` a row's bits depend
    on how many rows its group has. Here the last block of a group reaches into the next ones, whose
    own blocks come later. So what `out` has in its last `rows` rows, and after the last group, is
    undefined, and there have to be as many behind it.
    """
    group_end = jnp.cumsum(group_sizes)
    blocks = -(-group_sizes // rows)
    block_end = jnp.cumsum(blocks)

    def body(index, out):
        group = jnp.sum(block_end <= index)
        within = index - (block_end[group] - blocks[group])
        return block(out, group_end[group] - group_sizes[group] + within * rows, group, rows)

    with jax.named_scope(f"expert_blocks_{rows}"):
        return jax.lax.fori_loop(0, block_end[-1], body, out)


def block_sizes(num_rows: int, num_groups: int) -> list[int]:
    """Rows of a block: the large ones only where there are rows for four of them in each group."""
    large = [block for block in LARGE_BLOCK_ROWS if 4 * block * num_groups <= num_rows]
    return [block for block in BLOCK_ROWS if block <= num_rows] + large


def expected_turns(rows_per_group: float, num_groups: int, num_rows: int) -> dict[str, float]:
    """Turns of each loop of `for_each_block`, by its name scope, if all groups are equally large.

    For the schedule report, which cannot know the routing. `num_rows` is how many there could be.
    """
    rows, sizes = max(1, -(-rows_per_group // 1)), block_sizes(num_rows, num_groups)
    size = max(block for block in sizes if block <= rows)
    turns = num_groups * -(-rows // size) * min(1.0, rows_per_group)
    return {f"expert_blocks_{b}": turns if b == size else 0 for b in sizes}

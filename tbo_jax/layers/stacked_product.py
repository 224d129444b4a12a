"""A product with one matrix of a stack, read where it is (Pallas, Triton).

XLA:GPU writes out the slice of a stack before a product reads it: a copy of every projection in
every step of scanned layers. It fuses no slice into a product of its own, and for one of a library
only where the offset depends on nothing but the loop's counter, which the indices of a scan do not;
with such an offset jaxlib 0.10.2 does not compile it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import triton as plgpu
from tbo_jax.quantized import gpu_product

MOST_ROWS = 256  # with more a product takes longer than the copy, and a library's is faster
NAME = "tbo_stacked_product"
COLUMNS = 64  # of the result of a program
INNER = 64  # summed over at a time
PROGRAMS = 132  # one for each core of an H100; sums are cut until there are as many, at most
SMALLEST_TILE, LARGEST_TILE = 16, 64  # rows


class StackedMatrix(NamedTuple):
    """Matrix number `layer` of a stack."""

    stack: jax.Array  # [L, N, K]
    layer: jax.Array  # [] int32

    def sliced(self) -> jax.Array:
        """The matrix in an array of its own, [N, K]."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)


def takes(rows: int, dtype: Any, stack: jax.Array) -> bool:
    """Whether `product` computes [rows, K] times a matrix of `stack` [L, N, K]."""
    _, columns, inputs = stack.shape
    return (
        gpu_product.is_usable()
        and rows <= MOST_ROWS
        and stack.dtype == dtype
        and jnp.dtype(dtype).itemsize == 2  # Triton would round the factors of float32
        and columns % COLUMNS == 0
        and inputs % INNER == 0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, weight: StackedMatrix, interpret: bool = False) -> jax.Array:
    """`x @ weight.T`: [M, K], [N, K] -> [M, N] of the dtype of `x`, for what `takes` says."""
    (rows, inputs), columns = x.shape, weight.stack.shape[1]
    tile, steps, parts = _cut(rows, columns, inputs)
    dtype = x.dtype if parts == 1 else jnp.float32
    sums = pl.pallas_call(
        functools.partial(_kernel, tile=tile, steps=steps // parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, columns), dtype),
        grid=(-(-rows // tile), columns // COLUMNS, parts),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name=_name(rows, columns, inputs),
    )(x, weight.stack, jnp.asarray(weight.layer, jnp.int32).reshape(1))
    return sums[0] if parts == 1 else sums.sum(0).astype(x.dtype)


def plain(x: jax.Array, weight: StackedMatrix) -> jax.Array:
    """The same product with the matrix written out, by XLA."""
    return jnp.einsum("tk,nk->tn", x, weight.sliced())


def _forward(x: jax.Array, weight: StackedMatrix, interpret: bool) -> tuple[jax.Array, Any]:
    return product(x, weight, interpret), (x, weight)


def _backward(interpret: bool, kept: Any, gradient: jax.Array) -> Any:
    return jax.vjp(plain, *kept)[1](gradient)


product.defvjp(_forward, _backward)


def expected_work(
    rows: int, columns: int, inputs: int, dtype: Any
) -> dict[str, tuple[float, float]]:
    """Operations and bytes of `product`, by the name that XLA's text has for it."""
    parts, size = _cut(rows, columns, inputs)[2], jnp.dtype(dtype).itemsize
    written = size if parts == 1 else 4 * parts
    moved = size * inputs * (rows + columns) + written * rows * columns
    return {_name(rows, columns, inputs): (2.0 * rows * columns * inputs, moved)}


def _name(rows: int, columns: int, inputs: int) -> str:
    """The kernel's name, by which a schedule report finds its work."""
    return f"{NAME}_{rows}x{columns}x{inputs}"


def _cut(rows: int, columns: int, inputs: int) -> tuple[int, int, int]:
    """Rows of a tile, steps along what is summed, and in how many parts those are shared out."""
    tile = min(max(1 << (rows - 1).bit_length(), SMALLEST_TILE), LARGEST_TILE)
    programs = -(-rows // tile) * (columns // COLUMNS)
    parts, steps = 1, inputs // INNER
    while 2 * parts * programs <= PROGRAMS and steps % (2 * parts) == 0:
        parts *= 2
    return tile, steps, parts


def _kernel(x: Any, stack: Any, layer: Any, out: Any, *, tile: int, steps: int) -> None:
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    part, number = pl.program_id(2), layer[0]
    live = row < x.shape[0]

    def add(step: Any, total: jax.Array) -> jax.Array:
        inner = (part * steps + step) * INNER + jnp.arange(INNER, dtype=jnp.int32)
        zero = jnp.zeros((), x.dtype)
        rows = plgpu.load(x.at[row[:, None], inner[None, :]], mask=live[:, None], other=zero)
        block = plgpu.load(stack.at[number, column[:, None], inner[None, :]])
        return total + plgpu.dot(rows, block.T)

    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile, COLUMNS), jnp.float32))
    where = out.at[part, row[:, None], column[None, :]]
    plgpu.store(where, total.astype(out.dtype), mask=live[:, None])

"""A product with a quantised matrix on GPU, which decodes what it reads (Pallas, Triton).

Of a matrix whose factors change along what is summed, XLA:GPU writes out all decoded numbers before
the product: five times the bytes of FP8 (compiled for H100). So it does with any FP8 on A100. That
decides the time of a step with few rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import triton as plgpu
from tbo_jax.quantized.array import QuantizedArray
from tbo_jax.quantized.gpu_block import (
    Block,
    is_readable,
    load_inputs,
    multiply,
    readable,
)

_ENABLED = ContextVar("tbo_quantized_products", default=True)
MOST_ROWS = 256  # with more the decoded matrix is worth writing out: its product is faster
NAME = "tbo_quantized_product"
COLUMNS = 64  # of the result of a program
INNER_BYTES = 128  # of a row, summed over at a time
PROGRAMS = 264  # that keep a GPU of 132 cores busy; sums are cut until there are as many
SMALLEST_TILE, LARGEST_TILE = 16, 64  # rows


@contextmanager
def enabled(whether: bool) -> Iterator[None]:
    """Trace with this kernel, or without it.

    The layers are not told which kernels a step has but for attention and experts.
    """
    token = _ENABLED.set(whether)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def is_usable() -> bool:
    """Whether kernels of Triton may compute products: this JAX has it, and `enabled` allows it."""
    return plgpu is not None and _ENABLED.get()


def takes(rows: int, dtype: Any, weight: QuantizedArray) -> bool:
    """Whether `product` computes [rows, K] times `weight` [N, K], and is of use for it.

    It never does where this JAX has no Triton backend, or outside of `enabled`.
    """
    if not is_usable():
        return False
    columns, inputs = weight.shape
    size = INNER_BYTES // jnp.dtype(dtype).itemsize
    return (
        rows <= MOST_ROWS
        and (weight.format.kind == "fp8" or weight.format.block[1] < inputs)
        and columns % COLUMNS == 0
        and inputs % size == 0
        and is_readable(weight.format, -1, size)
    )


def product(x: jax.Array, weight: QuantizedArray, interpret: bool = False) -> jax.Array:
    """`x @ weight.T` in float32: [M, K], [N, K] -> [M, N], for what `takes` says."""
    (rows, inputs), columns = x.shape, weight.shape[0]
    tile, steps, parts = _cut(rows, inputs, columns, x.dtype)
    sums = pl.pallas_call(
        functools.partial(_kernel, tile=tile, steps=steps // parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, columns), jnp.float32),
        grid=(-(-rows // tile), columns // COLUMNS, parts),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name=_name(rows, columns, inputs),
    )(x, readable(weight))
    return sums[0] if parts == 1 else sums.sum(0)


def takes_each(rows: int, dtype: Any, weight: QuantizedArray, summed: int) -> bool:
    """Whether `product_each` computes [rows, N, K] times `weight`, and is of use for it."""
    if not is_usable():
        return False
    columns, inputs = weight.shape[-3 - summed], weight.shape[summed]
    size = INNER_BYTES // jnp.dtype(dtype).itemsize
    return (
        rows <= MOST_ROWS
        and columns % COLUMNS == 0
        and inputs % size == 0
        and is_readable(weight.format, summed, size)
    )


def product_each(
    x: jax.Array, weight: QuantizedArray, summed: int, interpret: bool = False
) -> jax.Array:
    """Products with a matrix for each of N heads, for what `takes_each` says.

    [T, N, K], [N, K, R] -> [T, N, R] of the dtype of `x`; with `summed` -1 the weight is [N, R, K].
    """
    (rows, heads, inputs), columns = x.shape, weight.shape[-3 - summed]
    tile = _tile(rows)
    flat = pl.pallas_call(
        functools.partial(_each_kernel, tile=tile, inputs=inputs, columns=columns, summed=summed),
        out_shape=jax.ShapeDtypeStruct((rows, heads * columns), x.dtype),
        grid=(-(-rows // tile), columns // COLUMNS, heads),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name=_each_name(rows, heads, columns, inputs),
    )(x.reshape(rows, heads * inputs), readable(weight))
    return flat.reshape(rows, heads, columns)


def expected_work(
    rows: int, columns: int, inputs: int, weight: QuantizedArray, dtype: Any
) -> dict[str, tuple[float, float]]:
    """Floating-point operations and bytes of `product`, by the name that XLA's text has for it.

    Of [rows, inputs] and a part [columns, inputs] of `weight`.
    """
    _, _, parts = _cut(rows, inputs, columns, dtype)
    held = weight.nbytes / math.prod(weight.shape) * columns * inputs
    moved = held + rows * (inputs * jnp.dtype(dtype).itemsize + 4 * columns * parts)
    return {_name(rows, columns, inputs): (2.0 * rows * columns * inputs, moved)}


def expected_work_each(
    rows: int, shape: tuple[int, int, int], summed: int, weight: QuantizedArray, dtype: Any
) -> dict[str, tuple[float, float]]:
    """Those of `product_each`, of [rows, N, K] and a part of `weight` of `shape`, that of numbers.

    Args:
        rows: T.
        shape: [N, K, R], or with `summed` -1 [N, R, K].
        summed: the axis of K, -2 or -1.
        weight: the whole, which tells how many bytes a number has.
        dtype: of what multiplies it.
    """
    heads, columns, inputs = shape[0], shape[-3 - summed], shape[summed]
    held = weight.nbytes / math.prod(weight.shape) * math.prod(shape)
    moved = held + rows * heads * (inputs + columns) * jnp.dtype(dtype).itemsize
    work = 2.0 * rows * math.prod(shape), moved
    return {_each_name(rows, heads, columns, inputs): work}


def _each_name(rows: int, heads: int, columns: int, inputs: int) -> str:
    return f"{NAME}_each_{rows}x{heads}x{columns}x{inputs}"


def _name(rows: int, columns: int, inputs: int) -> str:
    """The kernel's name, by which a schedule report finds its work."""
    return f"{NAME}_{rows}x{columns}x{inputs}"


def _tile(rows: int) -> int:
    """Rows of a program."""
    return min(max(1 << (rows - 1).bit_length(), SMALLEST_TILE), LARGEST_TILE)


def _cut(rows: int, inputs: int, columns: int, dtype: Any) -> tuple[int, int, int]:
    """Rows of a tile, steps along what is summed, and in how many parts those are shared out."""
    tile = _tile(rows)
    programs = -(-rows // tile) * (columns // COLUMNS)
    steps = inputs * jnp.dtype(dtype).itemsize // INNER_BYTES
    most = PROGRAMS // max(1, programs)
    # The largest power of two up to `most` that divides the steps.
    return tile, steps, math.gcd(steps, 1 << max(0, most.bit_length() - 1))


def _kernel(x: Any, weight: QuantizedArray, out: Any, *, tile: int, steps: int) -> None:
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    part = pl.program_id(2)
    live = row < x.shape[0]
    size = INNER_BYTES // x.dtype.itemsize

    def add(step: Any, total: jax.Array) -> jax.Array:
        block = Block((), (part * steps + step) * size, size, column)
        inputs = load_inputs(x, row, block.start, size, live, weight)
        return total + multiply(inputs, weight, block, -1)

    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile, COLUMNS), jnp.float32))
    plgpu.store(out.at[part, row[:, None], column[None, :]], total, mask=live[:, None])


def _each_kernel(
    x: Any, weight: QuantizedArray, out: Any, *, tile: int, inputs: int, columns: int, summed: int
) -> None:
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    head = pl.program_id(2)
    live = row < x.shape[0]
    size = INNER_BYTES // x.dtype.itemsize

    def add(step: Any, total: jax.Array) -> jax.Array:
        block = Block((head,), step * size, size, column)
        own = load_inputs(x, row, head * inputs + block.start, size, live, weight)
        return total + multiply(own, weight, block, summed)

    zero = jnp.zeros((tile, COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(0, inputs // size, add, zero).astype(x.dtype)
    place = (head * columns + column)[None, :]
    plgpu.store(out.at[row[:, None], place], total, mask=live[:, None])

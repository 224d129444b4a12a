"""A block of a quantised matrix inside a Pallas (Triton) kernel: read, decoded, multiplied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tbo_jax._pallas import triton as plgpu
from tbo_jax.quantized.array import (
    MIDDLE,
    Format,
    QuantizedArray,
    as_bits,
    decode_e2m1,
    decode_e4m3,
    decode_scales,
)


class Block(NamedTuple):
    """Which block of a matrix a product sums over: `size` of its inputs, and some columns."""

    lead: tuple[Any, ...]  # entries of the leading dimensions
    start: Any  # first input
    size: int
    columns: jax.Array  # [C] of the result


def is_readable(form: Format, summed: int, size: int) -> bool:
    """Whether blocks of `size` inputs, along axis `summed` of the matrix, can be decoded.

    They have whole blocks of the factors, or lie in one; numbers of 4 bits are packed along them.
    """
    shared = form.block[summed]
    if form.is_packed and (form.packed != summed or shared % 2):
        return False
    return shared % size == 0 or size % shared == 0


def readable(matrix: QuantizedArray) -> QuantizedArray:
    """The matrix as kernels take it: FP8 as bits, which load on every GPU."""
    if matrix.format.kind != "fp8":
        return matrix
    return replace(matrix, values=as_bits(matrix.values))


def load_inputs(
    rows: Any, row: jax.Array, start: Any, size: int, live: jax.Array, matrix: Any
) -> tuple[jax.Array, ...]:
    """`size` inputs of some rows, from `start` on, as they multiply `matrix`; zero if not live.

    [M, size]. Of numbers of 4 bits two stand in a byte: then two of [M, size / 2], the even inputs
    for the low halves, and the odd ones for the high.
    """
    packed = isinstance(matrix, QuantizedArray) and matrix.format.is_packed
    place = jnp.arange(size // 2 if packed else size, dtype=jnp.int32)
    inner = start + (2 * place if packed else place)

    def load(inner: jax.Array) -> jax.Array:
        zero = jnp.zeros((), rows.dtype)
        return plgpu.load(rows.at[row[:, None], inner[None, :]], mask=live[:, None], other=zero)

    return (load(inner), load(inner + 1)) if packed else (load(inner),)


def multiply(
    inputs: tuple[jax.Array, ...], matrix: QuantizedArray, block: Block, summed: int
) -> Any:
    """`inputs` (`load_inputs`) times a block of `matrix`, whose arrays are references: [M, C].

    The factors multiply the float32 sums where a block has one for each column; otherwise the
    numbers, which are then rounded to the dtype of the inputs.
    """
    form, dtype = matrix.format, inputs[0].dtype
    shared = form.block[summed]
    packed = 2 if form.is_packed else 1
    held = block.start // packed + jnp.arange(block.size // packed, dtype=jnp.int32)
    raw = _load(matrix.values, block.lead, held, block.columns, summed)
    # Rows of factors that the block has, and their place in the matrix.
    count = max(1, block.size // shared)
    at = block.start // shared + jnp.arange(count, dtype=jnp.int32)
    column = block.columns // form.block[-3 - summed]

    def spread(array: Any) -> jax.Array:
        """What there is of each block of factors, for each of the bytes or numbers read."""
        found = _load(array, block.lead, at, column, summed)
        if count == 1:
            return found
        size = raw.shape[0] // count
        shape = count, size, found.shape[1]
        return jnp.broadcast_to(found[:, None, :], shape).reshape(raw.shape)

    factors = decode_scales(form, spread(matrix.scales))
    numbers: tuple[jax.Array, ...] = (raw,)
    if form.is_packed:
        numbers = raw & 15, raw >> 4
    if form.kind == "mxfp4":
        numbers = tuple(decode_e2m1(half) for half in numbers)
    elif form.kind == "fp8":
        numbers = (decode_e4m3(raw),)
    elif form.kind == "int4":
        zero = MIDDLE if matrix.zeros is None else spread(matrix.zeros).astype(jnp.float32)
        numbers = tuple(half.astype(jnp.float32) - zero for half in numbers)
    if count > 1:
        numbers = tuple(half.astype(jnp.float32) * factors for half in numbers)
    total = sum(dot(x, half.astype(dtype)) for x, half in zip(inputs, numbers, strict=True))
    return total * factors if count == 1 else total


def _load(
    array: Any, lead: tuple[Any, ...], inner: jax.Array, column: jax.Array, summed: int
) -> Any:
    """[S, C] of a reference [..., K, N], or with `summed` -1 [..., N, K]."""
    pair = (inner[:, None], column[None, :])
    return plgpu.load(array.at[(*lead, *(pair if summed == -2 else pair[::-1]))])


def dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    """[M, S], [S, C] -> [M, C] float32; of float32 with all its bits."""
    # Else the tensor cores round float32 to 10 bits.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return plgpu.dot(x, weights, precision=precision)

"""A quantised array: numbers of 8 or 4 bits, and the factors that a block of them shares."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

Kind = Literal["fp8", "int8", "int4", "mxfp4"]

# What the numbers are held as. Those of 4 bits are two to a byte, the first in the low half.
STORED_AS: Mapping[Kind, Any] = {
    "fp8": jnp.float8_e4m3fn,
    "int8": jnp.int8,
    "int4": jnp.uint8,
    "mxfp4": jnp.uint8,
}
MIDDLE = 8  # what an int4 is less by where there are no zero points


@dataclass(frozen=True)
class Format:
    """What the numbers of a `QuantizedArray` mean.

    `block` has the rows and columns, of the last two dimensions, that share a factor; the last
    block of a dimension may be smaller. Numbers of 4 bits are packed along `packed`, the last
    dimension or the one before.
    """

    kind: Kind
    block: tuple[int, int]
    packed: Literal[-1, -2] = -1

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two numbers."""
        return self.kind in ("int4", "mxfp4")

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which the numbers of an array of `shape` are held.

        Raises:
            ValueError: numbers of 4 bits, and an odd count of them.
        """
        if not self.is_packed:
            return shape
        halves = list(shape)
        if halves[self.packed] % 2:
            raise ValueError(
                f"{halves[self.packed]} numbers of 4 bits do not fill bytes: expected an even count"
            )
        halves[self.packed] //= 2
        return tuple(halves)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the factors of an array of `shape`."""
        *lead, rows, columns = shape
        return (*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))

    def turned(self) -> Format:
        """That of an array with the last two dimensions the other way round."""
        return Format(self.kind, (self.block[1], self.block[0]), -2 if self.packed == -1 else -1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros"],
    meta_fields=["format"],
)
@dataclass(frozen=True)
class QuantizedArray:
    """An array [..., N, K] whose numbers are (values - zeros) * scales, a factor for each block.

    A pytree, so that it is sharded, stacked, scanned and given to a jitted function as any array
    is. What computes with it reads it through `project`, `times` or `decode`.
    """

    values: jax.Array  # as `Format.values_shape` and `STORED_AS` say
    scales: jax.Array  # as `Format.scales_shape` says; of mxfp4 exponents in uint8, 127 for 1
    zeros: jax.Array | None  # of int4: as many as there are factors, uint8; None: 8
    format: Format

    @classmethod
    def abstract(
        cls, form: Format, shape: tuple[int, ...], scale_dtype: Any, *, zeros: bool = False
    ) -> QuantizedArray:
        """One of shapes in place of arrays, for numbers of `shape`; `zeros`: it has zero points.

        Raises:
            ValueError: as `Format.values_shape`.
        """
        of_blocks = form.scales_shape(shape)
        values: Any = jax.ShapeDtypeStruct(form.values_shape(shape), STORED_AS[form.kind])
        scales: Any = jax.ShapeDtypeStruct(of_blocks, scale_dtype)
        zero: Any = jax.ShapeDtypeStruct(of_blocks, jnp.uint8) if zeros else None
        return cls(values, scales, zero, form)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K], that of the numbers."""
        shape = list(self.values.shape)
        if self.format.is_packed:
            shape[self.format.packed] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """That of what is held, not of what it stands for."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(self))

    def __getitem__(self, index: Any) -> Self:
        """Entries of the leading dimensions, or with `...` all.

        Raises:
            TypeError: an index that reaches into the last two dimensions.
        """
        if index is Ellipsis:
            return self
        if self.ndim < 3 or isinstance(index, tuple):
            raise TypeError(f"a quantised array of shape {self.shape} has no entry {index!r}")
        picked: Self = jax.tree.map(lambda leaf: leaf[index], self)
        return picked

    def numbers(self, dtype: Any) -> jax.Array:
        """[..., N, K]: the numbers before they are multiplied, which bfloat16 holds exactly."""
        kind = self.format.kind
        if kind == "fp8":
            return _fp8_numbers(self.values, dtype)
        if kind == "int8":
            return self.values.astype(dtype)
        axis = self.values.ndim + self.format.packed + 1
        low, high = self.values & 15, self.values >> 4
        pairs = jnp.stack([low, high], axis=axis).reshape(self.shape)
        if kind == "mxfp4":
            return decode_e2m1(pairs).astype(dtype)
        zero = MIDDLE if self.zeros is None else self.spread(self.zeros).astype(dtype)
        return pairs.astype(dtype) - zero

    def factors(self) -> jax.Array:
        """The factors as float32, one for each block."""
        return decode_scales(self.format, self.scales)

    def decode(self, dtype: Any) -> jax.Array:
        """[..., N, K]: the float32 products, rounded once to `dtype`."""
        return (self.numbers(jnp.float32) * self.spread(self.factors())).astype(dtype)

    def spread(self, blocks: jax.Array) -> jax.Array:
        """What there is of each block, for each number, or 1 along what has a single block."""
        for axis, size in zip((-2, -1), self.format.block, strict=True):
            count, whole = blocks.shape[axis], self.shape[axis]
            if count == 1:
                continue  # broadcasting does it, for less
            if whole == count * size:  # XLA fuses this; of `repeat` it makes a gather
                at = blocks.ndim + axis + 1
                spread = jnp.broadcast_to(
                    jnp.expand_dims(blocks, at), (*blocks.shape[:at], size, *blocks.shape[at:])
                )
                shape = list(blocks.shape)
                shape[axis] = whole
                blocks = spread.reshape(shape)
            else:
                index = jnp.arange(whole, dtype=jnp.int32) // size
                blocks = jnp.take(blocks, index, axis=axis)
        return blocks

    def with_specs(self, spec: Any) -> QuantizedArray:
        """Give each part the entry of a sharding that says how the whole [..., N, K] is shared out.

        A dimension along which there is one factor is on each device.
        """
        entries = (*spec, *[None] * (self.ndim - len(spec)))

        def of(part: Any) -> Any:
            if part is None:
                return None
            sizes = part.shape
            return type(spec)(
                *(None if size == 1 else entry for entry, size in zip(entries, sizes, strict=True))
            )

        return replace(
            self, values=type(spec)(*entries), scales=of(self.scales), zeros=of(self.zeros)
        )


def _fp8_numbers(values: jax.Array, dtype: Any) -> jax.Array:
    """A cast; on CPU by integers, which takes a ninth of the time (half on jax 0.12)."""

    def by_integers(values: jax.Array) -> jax.Array:
        return decode_e4m3(as_bits(values)).astype(dtype)

    return jax.lax.platform_dependent(
        values, cpu=by_integers, default=lambda values: values.astype(dtype)
    )


def as_bits(values: jax.Array) -> jax.Array:
    """Numbers of 8 bits as uint8, bit by bit."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8)


def decode_e2m1(bits: jax.Array) -> jax.Array:
    """Numbers of 4 bits, in uint8, as float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.

    Their exponent and mantissa are put in the place of a float16's, whose subnormals are theirs
    2 ** 14 times smaller; no table is read.
    """
    wide = bits.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type(((wide & 8) << 12) | ((wide & 7) << 9), jnp.float16)
    return half.astype(jnp.float32) * jnp.float32(1 << 14)


def decode_e4m3(bits: jax.Array) -> jax.Array:
    """Numbers of 8 bits, in uint8, as float32; it is what a cast of float8_e4m3fn gives.

    By integers, as `decode_e2m1`: of a cast Triton makes an instruction that GPUs before compute
    capability 8.9 do not have, and XLA aborts.
    """
    wide = bits.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type(((wide & 128) << 8) | ((wide & 127) << 7), jnp.float16)
    number = half.astype(jnp.float32) * jnp.float32(1 << 8)
    return jnp.where((wide & 127) == 127, jnp.float32(jnp.nan), number)


def decode_scales(form: Format, scales: jax.Array) -> jax.Array:
    """Factors of a form, as they are held, as float32."""
    return decode_e8m0(scales) if form.kind == "mxfp4" else scales.astype(jnp.float32)


def decode_e8m0(exponents: jax.Array) -> jax.Array:
    """Factors 2 ** (e - 127) as float32; of 255 it is NaN."""
    wide = exponents.astype(jnp.uint32)
    half_of_least = jnp.uint32(1 << 22)  # 2 ** -127 is subnormal
    bits = jnp.where(wide == 0, half_of_least, wide << 23)
    bits = jnp.where(wide == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def times_each(x: jax.Array, weight: jax.Array | QuantizedArray, summed: int) -> jax.Array:
    """Products with a matrix for each of N heads, in the dtype of `x`.

    [T, N, K], [N, K, R] -> [T, N, R]; with `summed` -1 the weight is [N, R, K].
    """
    axes = "tnk,nkr->tnr" if summed == -2 else "tnk,nrk->tnr"
    if not isinstance(weight, QuantizedArray):
        return jnp.einsum(axes, x, weight)
    other = -3 - summed
    if weight.zeros is not None or 1 not in weight.scales.shape[-2:]:
        return jnp.einsum(axes, x, weight.decode(x.dtype))
    # As in `times`; factors that differ along what is summed multiply the rows.
    of_result = weight.scales.shape[summed] == 1
    factors = jnp.squeeze(weight.spread(weight.factors()), summed if of_result else other)
    rows = x if of_result else (x * factors).astype(x.dtype)
    product = jnp.einsum(axes, rows, weight.numbers(x.dtype), preferred_element_type=jnp.float32)
    return (product * factors if of_result else product).astype(x.dtype)


def decoded(weight: jax.Array | QuantizedArray, dtype: Any) -> jax.Array:
    """A weight as an array of `dtype`, whatever holds it; one that is an array stays as it is."""
    return weight.decode(dtype) if isinstance(weight, QuantizedArray) else weight


def times(x: jax.Array, weight: jax.Array | QuantizedArray, summed: int = -2) -> jax.Array:
    """`x @ weight` in float32: [M, K], [K, N] -> [M, N]; with `summed` -1 the weight is [N, K]."""
    contract = (((1,), (weight.ndim + summed,)), ((), ()))

    def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, matrix, contract, preferred_element_type=jnp.float32)

    def dot(matrix: jax.Array) -> jax.Array:
        if x.shape[0] != 1 or x.dtype != jnp.bfloat16:
            return product(x, matrix)
        # XLA:CPU hands two rows and more to a library; of one it makes a loop: 40 products of
        # [1, 576] and [1536, 576] take 74 ms, of [2, 576] 4 (2 cores, jax 0.10.2; 0.12: 88 and 4).
        return jax.lax.platform_dependent(
            x,
            matrix,
            cpu=lambda x, matrix: product(jnp.pad(x, ((0, 1), (0, 0))), matrix)[:1],
            default=product,
        )

    if not isinstance(weight, QuantizedArray):
        return dot(weight)
    shared = weight.scales.shape[summed] == 1  # a factor for each column of the result, or for all
    if not shared or weight.zeros is not None:
        return dot(weight.decode(x.dtype))
    # So XLA:GPU converts what it reads within the product. A product of the weight and its factors
    # it writes out first: five bytes of traffic for one.
    factors = weight.spread(weight.factors())
    return dot(weight.numbers(x.dtype)) * (factors if summed == -2 else factors.T)

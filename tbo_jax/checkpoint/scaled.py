"""Weights with a tensor of factors beside them, as compressed-tensors and ModelOpt write them.

Of a weight `NAME.weight` [out, in] there are (compressed-tensors 0.20; ModelOpt has the first form)

- `NAME.weight` in float8_e4m3fn or int8 and `NAME.weight_scale`: one factor, one for each output
  [out, 1], for groups of inputs [out, in / g], or for blocks;
- or `NAME.weight_packed`, int32 [out, in / 8], eight numbers of 4 bits in each, the first lowest,
  more by 8, `NAME.weight_scale`, `NAME.weight_shape` and, of asymmetric ones,
  `NAME.weight_zero_point`, int32 [out / 8, in / g], packed along the outputs. Of 8 bits there are
  four in each, more by 128.

What else stands there is of activations, which are not quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.encoding import Encoding, Index, TensorOf, decode_into
from tbo_jax.checkpoint.quantized import FLOAT8, PlainWeights
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder

WEIGHT = "weight"
SCALE, PACKED, SHAPE = "weight_scale", "weight_packed", "weight_shape"
ZEROS, ORDER = "weight_zero_point", "weight_g_idx"
_OF_ACTIVATIONS = ".input_scale", ".input_zero_point", ".output_scale", ".input_global_scale"


@dataclass(frozen=True)
class ScaledWeights(PlainWeights):
    """A `WeightFormat`: what has a `weight_scale` is quantised, the rest is plain.

    `block` is that of factors for blocks; the other kinds show in the shape of the factors.
    """

    block: tuple[int, int] | None = None

    def passes_over(self, name: str) -> bool:
        return name.endswith(_OF_ACTIVATIONS)

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        base = name.removesuffix(WEIGHT)
        if not name.endswith(WEIGHT) or base + SCALE not in self.tensors:
            return {name: shape}
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._where(base + SCALE)} is there, but {name} has shape {list(shape)}, "
                "expected a matrix"
            )
        factors = self.tensors.info(base + SCALE)
        if factors.dtype.kind == "i" or factors.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self._where(base + SCALE)} is {factors.dtype}, expected float32, bfloat16 or "
                "float16"
            )
        self._block(name, shape)
        found = {base + SCALE: factors.shape}
        if base + PACKED not in self.tensors:
            if name in self.tensors and self.tensors.info(name).dtype not in (FLOAT8, np.int8):
                raise CheckpointError(
                    f"{self._where(name)} is {self.tensors.info(name).dtype}, expected "
                    f"{FLOAT8} or int8 beside {base}{SCALE}"
                )
            found[name] = shape
            self._check_no_zeros(base)
            if base + ZEROS in self.tensors:
                found[base + ZEROS] = self.tensors.info(base + ZEROS).shape
            return found
        self._check_order(base, shape)
        rows, columns = shape
        found[base + PACKED] = (rows, -(-columns // (4 if self._has_8_bits(base, shape) else 8)))
        if base + SHAPE in self.tensors:
            found[base + SHAPE] = (2,)
        if self._has_8_bits(base, shape):
            self._check_no_zeros(base)
        if base + ZEROS in self.tensors:
            found[base + ZEROS] = (-(-rows // 8), self._groups(name, shape))
        if base + ORDER in self.tensors:
            found[base + ORDER] = (columns,)
        return found

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        return self._encoding(name, shape)

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        base = name.removesuffix(WEIGHT)
        if base == name or base + SCALE not in self.tensors:
            super().read_into(name, out, index, transpose=transpose)
            return
        shape = self._shape(base)
        found = self._encoding(name, shape)
        assert found is not None
        decode_into(found, name, shape, out, index, transpose=transpose)

    def _shape(self, base: str) -> tuple[int, ...]:
        if base + PACKED not in self.tensors:
            return self.tensors.info(base + WEIGHT).shape
        if base + SHAPE in self.tensors:
            return tuple(int(n) for n in self.tensors.read(base + SHAPE))
        raise CheckpointError(f"{self._where(base + SHAPE)} is missing")

    def _encoding(self, name: str, shape: tuple[int, ...]) -> Encoding | None:
        base = name.removesuffix(WEIGHT)
        if base == name or base + SCALE not in self.tensors:
            return None
        block = self._block(name, shape)
        of_blocks = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
        scales = TensorOf(self.tensors, SCALE, WEIGHT, of_blocks)
        dtype = self.tensors.info(base + SCALE).dtype
        if base + PACKED in self.tensors:
            if self._has_8_bits(base, shape):
                return Encoding("int8", block, PackedInt8(self.tensors), scales, dtype)
            zeros = None
            if base + ZEROS in self.tensors:
                zeros = PackedColumns(self.tensors, ZEROS, WEIGHT)
            return Encoding(
                "int4", block, PackedRows(self.tensors, PACKED, WEIGHT), scales, dtype, zeros
            )
        kind = self.tensors.info(name).dtype
        return Encoding(
            "fp8" if kind == FLOAT8 else "int8", block, TensorOf(self.tensors), scales, dtype
        )

    def _groups(self, name: str, shape: tuple[int, ...]) -> int:
        return -(-shape[1] // self._block(name, shape)[1])

    def _block(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Outputs and inputs that share a factor, from the shape of the factors."""
        scale = name.removesuffix(WEIGHT) + SCALE
        found, (rows, columns) = self.tensors.info(scale).shape, shape
        if found in ((), (1,), (1, 1)):
            return rows, columns
        if self.block is not None:
            height, width = self.block
            if found == (-(-rows // height), -(-columns // width)):
                return self.block
        elif found in ((rows,), (rows, 1)):
            return 1, columns
        elif len(found) == 2 and found[0] == rows and columns % found[1] == 0:
            return 1, columns // found[1]
        raise CheckpointError(
            f"{self._where(scale)} has shape {list(found)}, expected one factor of {name} "
            f"{list(shape)}, one for each output, or for "
            + ("groups of inputs" if self.block is None else f"blocks of {list(self.block)}")
        )

    def _check_order(self, base: str, shape: tuple[int, ...]) -> None:
        if base + ORDER not in self.tensors:
            return
        order = self.tensors.read(base + ORDER)
        width = self._block(base + WEIGHT, shape)[1]
        if not np.array_equal(order, np.arange(shape[1]) // width):
            raise CheckpointError(
                f"{self._where(base + ORDER)}: groups that follow the activations (act-order) are "
                "not supported, expected groups of neighbours"
            )

    def _has_8_bits(self, base: str, shape: tuple[int, ...]) -> bool:
        """Whether an int32 holds four numbers instead of eight."""
        return self.tensors.info(base + PACKED).shape == (shape[0], -(-shape[1] // 4))

    def _check_no_zeros(self, base: str) -> None:
        """Raise CheckpointError for numbers of 8 bits with zero points."""
        if base + ZEROS in self.tensors and self.tensors.read(base + ZEROS).any():
            raise CheckpointError(
                f"{self._where(base + ZEROS)} of 8 bits is not supported, expected none, or zeros"
            )

    def _where(self, tensor: str) -> str:
        return f"{self.tensors.folder}: tensor {tensor}"


@dataclass(frozen=True)
class PackedRows:
    """The bytes of int32 [out, N]: [out, 4 N], the lowest of each first."""

    tensors: TensorFolder
    suffix: str
    instead_of: str

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        tensor = name.removesuffix(self.instead_of) + self.suffix
        width = 4 * self.tensors.info(tensor).shape[1]
        rows, columns = index or (slice(None), slice(None))
        start, stop, _ = columns.indices(width)
        read = self.tensors.read(tensor, (rows, slice(start // 4, -(-stop // 4))))
        part = as_bytes(read)[:, start % 4 :][:, : stop - start]
        out[...] = part.T if transpose else part


@dataclass(frozen=True)
class PackedInt8:
    """Numbers of 8 bits [out, in], four to an int32, more by 128."""

    tensors: TensorFolder

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        read = np.empty(out.T.shape if transpose else out.shape, np.uint8)
        PackedRows(self.tensors, PACKED, WEIGHT).read_into(name, read, index)
        part = (read ^ 128).view(np.int8)
        out[...] = part.T if transpose else part


@dataclass(frozen=True)
class PackedColumns:
    """Zero points of 4 bits [out, G], eight to an int32 along the outputs."""

    tensors: TensorFolder
    suffix: str
    instead_of: str

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        packed = self.tensors.read(name.removesuffix(self.instead_of) + self.suffix)
        whole = halves(as_bytes(np.ascontiguousarray(packed.T))).T
        part = whole if index is None else whole[index]
        out[...] = part.T if transpose else part


def as_bytes(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[..., N] int32 -> [..., 4 N] uint8, the lowest first."""
    return np.ascontiguousarray(packed).astype("<i4", copy=False).view(np.uint8)


def halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., N] -> [..., 2 N]: the low half of each byte, then the high one."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)

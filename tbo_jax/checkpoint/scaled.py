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

from tbo_jax.checkpoint.encoding import Encoding, Index, PartReader, TensorOf, halves
from tbo_jax.checkpoint.quantized import FLOAT8, EncodedWeights
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.quantized.array import Format, Kind

WEIGHT = "weight"
SCALE, PACKED, SHAPE = "weight_scale", "weight_packed", "weight_shape"
ZEROS, ORDER = "weight_zero_point", "weight_g_idx"
INPUT_FACTORS = "pre_quant_scale"
OF_ACTIVATIONS = ".input_scale", ".input_zero_point", ".output_scale", ".input_global_scale"
_OF_STACKS = "_scale", "_packed", ".weight_scale", ".weight_packed"


@dataclass(frozen=True)
class ScaledWeights(EncodedWeights):
    """A `WeightFormat`: what has a `weight_scale` is quantised, the rest is plain.

    `block` is that of factors for blocks; the other kinds show in the shape of the factors.
    """

    block: tuple[int, int] | None = None

    def passes_over(self, name: str) -> bool:
        return name.endswith(OF_ACTIVATIONS)

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        base = name.removesuffix(WEIGHT)
        check_matrix(self.tensors, name, shape)
        if not self._is_scaled(name):
            return {name: shape}
        if base + INPUT_FACTORS in self.tensors:
            raise CheckpointError(
                f"{self._where(base + INPUT_FACTORS)}: inputs that are multiplied before the "
                "product (SmoothQuant, AWQ) are not supported, expected none"
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
        rows, columns = shape
        if base + ORDER in self.tensors:
            found[base + ORDER] = (columns,)
            self.check_order(base + ORDER, columns, self._block(name, shape)[1], "act-order")
        found[base + PACKED] = (rows, -(-columns // (4 if self._has_8_bits(base, shape) else 8)))
        if base + SHAPE in self.tensors:
            found[base + SHAPE] = (2,)
        if self._has_8_bits(base, shape):
            self._check_no_zeros(base)
        if base + ZEROS in self.tensors:
            found[base + ZEROS] = (-(-rows // 8), -(-columns // self._block(name, shape)[1]))
        return found

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        if not self._is_scaled(name):
            return None
        base, block = name.removesuffix(WEIGHT), self._block(name, shape)
        of_blocks = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
        scales = TensorOf(self.tensors, SCALE, WEIGHT, of_blocks)
        dtype = self.tensors.info(base + SCALE).dtype
        if base + PACKED not in self.tensors:
            kind: Kind = "fp8" if self.tensors.info(name).dtype == FLOAT8 else "int8"
            return Encoding(Format(kind, block), TensorOf(self.tensors), scales, dtype)
        packed = PackedRows(self.tensors)
        if self._has_8_bits(base, shape):
            return Encoding(Format("int8", block), PackedInt8(packed), scales, dtype)
        zeros = PackedColumns(self.tensors) if base + ZEROS in self.tensors else None
        return Encoding(Format("int4", block), packed, scales, dtype, zeros)

    def held_shape(self, name: str) -> tuple[int, ...] | None:
        base = name.removesuffix(WEIGHT)
        if not self._is_scaled(name):
            return None
        if base + PACKED not in self.tensors:
            return self.tensors.info(name).shape
        if base + SHAPE in self.tensors:
            return tuple(int(n) for n in self.tensors.read(base + SHAPE))
        raise CheckpointError(f"{self._where(base + SHAPE)} is missing")

    def _is_scaled(self, name: str) -> bool:
        return name.endswith(WEIGHT) and name.removesuffix(WEIGHT) + SCALE in self.tensors

    def _block(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Outputs and inputs that share a factor, from the shape of the factors."""
        scale = name.removesuffix(WEIGHT) + SCALE
        found, (rows, columns) = self.tensors.info(scale).shape, shape
        if len(found) == 4 and found[1::2] == (1, 1):  # ModelOpt's, of blocks
            found = found[::2]
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
class PackedRows(PartReader):
    """The bytes of int32 [out, N]: [out, 4 N], the lowest of each first."""

    tensors: TensorFolder

    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        tensor = name.removesuffix(WEIGHT) + PACKED
        rows, columns = index or (slice(None), slice(None))
        start, stop, _ = columns.indices(4 * self.tensors.info(tensor).shape[1])
        read = self.tensors.read(tensor, (rows, slice(start // 4, -(-stop // 4))))
        return as_bytes(read)[:, start % 4 :][:, : stop - start]


@dataclass(frozen=True)
class PackedInt8(PartReader):
    """Numbers of 8 bits [out, in], four to an int32, more by 128."""

    packed: PackedRows

    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        return (self.packed.read(name, index) ^ 128).view(np.int8)


@dataclass(frozen=True)
class PackedColumns(PartReader):
    """Zero points of 4 bits [out, G], eight to an int32 along the outputs."""

    tensors: TensorFolder

    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        packed = self.tensors.read(name.removesuffix(WEIGHT) + ZEROS)
        whole = halves(as_bytes(np.ascontiguousarray(packed.T))).T
        return whole if index is None else whole[index]


def check_matrix(tensors: TensorFolder, name: str, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError for factors beside what is no matrix, such as all experts in one.

    llm-compressor 0.14 writes the matrices of each expert alone.
    """
    beside = [name + suffix for suffix in _OF_STACKS if name + suffix in tensors]
    if len(shape) != 2 and beside:
        raise CheckpointError(
            f"{tensors.folder}: tensor {beside[0]}: factors of {name} {list(shape)}, expected a "
            "matrix; quantised experts in one tensor are not supported"
        )


def as_bytes(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[..., N] int32 -> [..., 4 N] uint8, the lowest first."""
    return np.ascontiguousarray(packed).astype("<i4", copy=False).view(np.uint8)

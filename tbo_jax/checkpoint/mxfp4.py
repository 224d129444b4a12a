"""MXFP4 weights of a checkpoint, read as the numbers that they stand for.

Format (OCP Microscaling Formats, version 1.0, 2023; laid out as in gpt-oss): a weight [E, in, out]
is stored as `NAME_blocks`, bytes [E, out, in / 32, 16] with two e2m1 numbers in each, the first in
the low half, and `NAME_scales`, bytes [E, out, in / 32]: a scale s is the factor 2 ** (s - 127) of
a block of 32 numbers, 255 is NaN. Each product has two significant bits: bfloat16 holds it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.encoding import Encoding
from tbo_jax.checkpoint.quantized import PlainWeights
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder, assign
from tbo_jax.quantized.array import Format

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # numbers that share a scale

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1: the sign is the highest of four bits
_NUMBERS = np.array([*_POSITIVE, *(-n for n in _POSITIVE)], np.float32)
# The two of a byte [256], as one element of 8 bytes: 13 times the speed of looking up rows of two.
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1).view(np.uint64)[:, 0]
_FACTORS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@dataclass(frozen=True)
class Mxfp4Weights(PlainWeights):
    """A `WeightFormat`: experts in MXFP4; weights without blocks are plain."""

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        found = [name + suffix for suffix in (BLOCKS, SCALES) if name + suffix in self.tensors]
        if not found:
            return {name: shape}
        for tensor in found:
            if (dtype := self.tensors.info(tensor).dtype) != np.uint8:
                raise CheckpointError(
                    f"{self.tensors.folder}: tensor {tensor} is {dtype}, expected uint8"
                )
        if len(shape) != 3 or shape[1] % BLOCK:
            raise CheckpointError(
                f"{self.tensors.folder}: tensor {found[0]} is there, but {name} of shape "
                f"{list(shape)} does not divide into blocks of {BLOCK}"
            )
        experts, rows, columns = shape
        scales = experts, columns, rows // BLOCK
        return {name + BLOCKS: (*scales, BLOCK // 2), name + SCALES: scales}

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        if name + BLOCKS not in self.tensors:
            return None
        values, scales = _Packed(self.tensors), _Exponents(self.tensors)
        return Encoding(Format("mxfp4", (BLOCK, 1), -2), values, scales, np.dtype(np.uint8))

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        """As `WeightFormat.read_into`; what is quantised is decoded an expert at a time."""
        if name + BLOCKS not in self.tensors:
            super().read_into(name, out, index, transpose=transpose)
            return
        if transpose:
            raise ValueError(f"weight {name!r}: only 2-D ones transpose")
        experts, taken, trim = _whole_blocks(self.tensors, name, index, BLOCK)
        for number, expert in enumerate(experts):
            blocks, scales = (
                self.tensors.read(name + suffix, (slice(expert, expert + 1), *taken))[0]
                for suffix in (BLOCKS, SCALES)
            )
            assign(out[number], decode(blocks, scales)[:, trim].T, tiled=True)


@dataclass(frozen=True)
class _Packed:
    """The bytes [E, in / 2, out] of a weight."""

    tensors: TensorFolder

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        experts, taken, trim = _whole_blocks(self.tensors, name, index, BLOCK // 2)
        for number, expert in enumerate(experts):
            blocks = self.tensors.read(name + BLOCKS, (slice(expert, expert + 1), *taken))[0]
            assign(out[number], blocks.reshape(len(blocks), -1)[:, trim].T, tiled=True)


@dataclass(frozen=True)
class _Exponents:
    """The scales [E, in / 32, out] of a weight."""

    tensors: TensorFolder

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        experts, rows, columns = index or (slice(None),) * 3
        self.tensors.read_into(name + SCALES, out, (experts, columns, rows), transpose=True)


def _whole_blocks(
    tensors: TensorFolder, name: str, index: tuple[slice, ...] | None, size: int
) -> tuple[range, tuple[slice, slice], slice]:
    """What holds the part `index` of [E, rows, columns], of which `size` rows are a block.

    The experts, the columns and blocks to read of each, and which of the rows that are read count.
    """
    count, width, groups = tensors.info(name + SCALES).shape
    shape = count, groups * size, width
    whole = (slice(None),) * len(shape)
    experts, rows, columns = (
        range(*part.indices(n)) for part, n in zip(index or whole, shape, strict=True)
    )
    first = rows.start // size
    taken = slice(columns.start, columns.stop), slice(first, -(-rows.stop // size))
    return experts, taken, slice(rows.start - first * size, rows.stop - first * size)


def decode(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers [..., 32 * G] of blocks [..., G, 16] with scales [..., G].

    Infinite where a product is beyond float32, as 6 * 2 ** 127 is.
    """
    numbers = _PAIRS[blocks].view(np.float32).reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore"):
        numbers *= _FACTORS[scales][..., None]
    return numbers.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)

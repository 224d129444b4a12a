"""Weights of 4 bits as GPTQ and AWQ checkpoints hold them: `NAME.qweight`, `.qzeros`, `.scales`.

Of a weight [out, in] in groups of g inputs the factors are [in / g, out], and

- GPTQ: qweight int32 [in / 8, out], eight inputs in each, the first lowest; qzeros int32
  [in / g, out / 8]; g_idx int32 [in], the group of each input. Format "gptq" has zero points that
  are less by one, "gptq_v2" has them as they are.
- AWQ (version "gemm"): qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8], eight outputs
  in each, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.encoding import Encoding, Index, PartReader, TensorOf, halves
from tbo_jax.checkpoint.quantized import EncodedWeights
from tbo_jax.checkpoint.scaled import as_bytes
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.quantized.array import Format

WEIGHT = "weight"
NUMBERS, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
AWQ_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # where each of eight outputs stands


@dataclass(frozen=True)
class GroupedInt4Weights(EncodedWeights):
    """A `WeightFormat`: what has a `qweight` is quantised, the rest is plain.

    `group` inputs share a factor, None: all. With `awq` that layout, else GPTQ's, whose zero points
    are `less` by so much. Of `symmetric` ones they are all 8.
    """

    group: int | None
    awq: bool = False
    less: int = 0
    symmetric: bool = False

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        base = name.removesuffix(WEIGHT)
        if self.held_shape(name) is None:
            return {name: shape}
        group = self.group or shape[-1]
        if len(shape) != 2 or shape[0] % 8 or shape[1] % 8 or shape[1] % group:
            raise CheckpointError(
                f"{self.tensors.folder}: tensor {base}{NUMBERS} is there, but {name} of shape "
                f"{list(shape)} does not divide into eights and groups of {group}"
            )
        outputs, inputs = shape
        found: dict[str, tuple[int, ...]] = {
            base + NUMBERS: (inputs, outputs // 8) if self.awq else (inputs // 8, outputs),
            base + ZEROS: (inputs // group, outputs // 8),
            base + SCALES: (inputs // group, outputs),
        }
        for tensor in (base + NUMBERS, base + ZEROS):
            if tensor in self.tensors and self.tensors.info(tensor).dtype != np.int32:
                raise CheckpointError(
                    f"{self.tensors.folder}: tensor {tensor} is {self.tensors.info(tensor).dtype}, "
                    "expected int32"
                )
        if base + ORDER in self.tensors:
            found[base + ORDER] = (inputs,)
            self.check_order(base + ORDER, inputs, group, "desc_act, act-order")
        if self.symmetric and base + ZEROS in self.tensors:
            zeros = halves(as_bytes(self.tensors.read(base + ZEROS)))
            if ((zeros + self.less) % 16 != 8).any():
                raise CheckpointError(
                    f"{self.tensors.folder}: tensor {base}{ZEROS} has zero points beside 8, but "
                    "quantization_config says sym=true"
                )
        return found

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        if self.held_shape(name) is None:
            return None
        return Encoding(
            Format("int4", (1, self.group or shape[-1])),
            (_AwqNumbers if self.awq else _GptqNumbers)(self.tensors),
            _Turned(TensorOf(self.tensors, SCALES, WEIGHT)),
            self.tensors.info(name.removesuffix(WEIGHT) + SCALES).dtype,
            None if self.symmetric else _Zeros(self.tensors, self.awq, self.less),
        )

    def held_shape(self, name: str) -> tuple[int, ...] | None:
        base = name.removesuffix(WEIGHT)
        if base == name or base + NUMBERS not in self.tensors:
            return None
        rows, columns = self.tensors.info(base + NUMBERS).shape
        return (8 * columns, rows) if self.awq else (columns, 8 * rows)


def _bounds(index: Index | None, shape: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns with a start and a stop."""
    rows, columns = (
        slice(*part.indices(n)) for part, n in zip(index or (slice(None),) * 2, shape, strict=True)
    )
    return rows, columns


@dataclass(frozen=True)
class _Turned:
    """A tensor [G, out] as [out, G]."""

    tensor: TensorOf

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        turned = None if index is None else (index[1], index[0])
        self.tensor.read_into(name, out, turned, transpose=not transpose)


@dataclass(frozen=True)
class _GptqNumbers(PartReader):
    """Bytes [out, in / 2]."""

    tensors: TensorFolder

    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        tensor = name.removesuffix(WEIGHT) + NUMBERS
        height, width = self.tensors.info(tensor).shape
        rows, columns = _bounds(index, (width, 4 * height))
        taken = slice(columns.start // 4, -(-columns.stop // 4)), rows
        packed = as_bytes(np.ascontiguousarray(self.tensors.read(tensor, taken).T))
        return packed[:, columns.start % 4 :][:, : columns.stop - columns.start]


@dataclass(frozen=True)
class _AwqNumbers(PartReader):
    """Bytes [out, in / 2], packed anew along the inputs."""

    tensors: TensorFolder

    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        tensor = name.removesuffix(WEIGHT) + NUMBERS
        height, width = self.tensors.info(tensor).shape
        rows, columns = _bounds(index, (8 * width, height // 2))
        taken = (
            slice(2 * columns.start, 2 * columns.stop),
            slice(rows.start // 8, -(-rows.stop // 8)),
        )
        numbers = _unpack_awq(self.tensors.read(tensor, taken))  # [in, out]
        numbers = numbers[:, rows.start % 8 :][:, : rows.stop - rows.start]
        return (numbers[0::2] | numbers[1::2] << 4).T


@dataclass(frozen=True)
class _Zeros(PartReader):
    """Zero points [out, in / g]."""

    tensors: TensorFolder
    awq: bool
    less: int

    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        packed = self.tensors.read(name.removesuffix(WEIGHT) + ZEROS)
        zeros = _unpack_awq(packed) if self.awq else halves(as_bytes(packed))
        whole = (zeros + np.uint8(self.less)).T & 15
        return whole if index is None else whole[index]


def _unpack_awq(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[N, out / 8] int32 -> [N, out]."""
    numbers = halves(as_bytes(packed)).reshape(len(packed), -1, 8)
    return numbers[..., AWQ_PLACES].reshape(len(packed), -1)

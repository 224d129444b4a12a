"""How the tensors of a checkpoint hold its weights: as they are, or quantised.

A format answers two questions about a weight of the model: which tensors hold it, and what its
values are. Everything else that is known of a checkpoint (names, layers, experts, shards) is in
`names` and `load`, which ask in terms of whole weights.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.encoding import Encoding, TensorOf, decode_into
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder, assign
from tbo_jax.quantized.array import Format

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_DECODED = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)  # twice as fast as a cast
_COLUMNS = 256  # that are decoded together: they stay in the cache
SCALE = "_scale_inv"  # behind the name of a weight: by what it is multiplied, despite the name


class WeightFormat(Protocol):
    """How a checkpoint holds its weights."""

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The tensors that hold weight `name` of shape `shape`, with the shapes they must have.

        Raises:
            CheckpointError: tensors that contradict one another.
        """

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        """Read weight `name`, or a part of it, into `out`; see `TensorFolder.read_into`."""

    def passes_over(self, name: str) -> bool:
        """Whether a tensor that belongs to no weight may stand there, and does not count."""

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        """What is held of weight `name`, whose inputs are along axis `inputs`; None: its values."""


@dataclass(frozen=True)
class PlainWeights:
    """A tensor for each weight."""

    tensors: TensorFolder

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {name: shape}

    def passes_over(self, name: str) -> bool:
        return False

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        self.tensors.read_into(name, out, index, transpose=transpose)

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        return None


@dataclass(frozen=True)
class EncodedWeights(PlainWeights, abc.ABC):
    """Weights of which some are held as their `encoding` says, and decoded by that."""

    @abc.abstractmethod
    def held_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a weight that is quantised; None: it is plain."""

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        shape = self.held_shape(name)
        if shape is None:
            super().read_into(name, out, index, transpose=transpose)
            return
        found = self.encoding(name, shape, -1)
        assert found is not None
        decode_into(found, name, shape, out, index, transpose=transpose)

    def check_order(self, tensor: str, inputs: int, group: int, called: str) -> None:
        """Raise CheckpointError unless the groups that a tensor tells of are of neighbours."""
        if not np.array_equal(self.tensors.read(tensor), np.arange(inputs) // group):
            raise CheckpointError(
                f"{self.tensors.folder}: tensor {tensor}: groups that follow the activations "
                f"({called}) are not supported, expected groups of neighbours"
            )


@dataclass(frozen=True)
class BlockScaledWeights(PlainWeights):
    """Matrices in float8_e4m3fn with a factor for each block (DeepSeek-V3, 2024, section 3.3).

    The factors of a matrix [out, in] are a second tensor [ceil(out / height), ceil(in / width)].
    A weight is the float32 product of the two, rounded once to the dtype that is asked for. Weights
    without factors are plain.
    """

    block: tuple[int, int]  # height, width

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        scaled = name + SCALE in self.tensors
        dtype = self.tensors.info(name).dtype if name in self.tensors else None
        if scaled and dtype is not None and (dtype != FLOAT8 or len(shape) != 2):
            raise CheckpointError(
                f"{self.tensors.folder}: {name}{SCALE} is there, but {name} is {dtype} with "
                f"{len(shape)} dimensions, expected a matrix of {FLOAT8}"
            )
        if not scaled and dtype is not None and dtype.itemsize == 1:
            raise CheckpointError(f"{self.tensors.folder}: {name} is {dtype} without {name}{SCALE}")
        if not scaled:
            return {name: shape}
        blocks = tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))
        return {name: shape, name + SCALE: blocks}

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        if name + SCALE not in self.tensors:
            return None
        values, scales = TensorOf(self.tensors), TensorOf(self.tensors, SCALE)
        return Encoding(Format("fp8", self.block), values, scales, np.dtype(np.float32))

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        if name + SCALE not in self.tensors:
            super().read_into(name, out, index, transpose=transpose)
            return
        whole = tuple(slice(0, n) for n in self.tensors.info(name).shape)
        rows, columns = (
            range(*part.indices(n.stop)) for part, n in zip(index or whole, whole, strict=True)
        )
        if not rows or not columns:
            return
        height, width = self.block
        first = rows.start // height, columns.start // width
        factors = self.tensors.read(
            name + SCALE,
            (slice(first[0], -(-rows.stop // height)), slice(first[1], -(-columns.stop // width))),
        ).astype(np.float32)
        skipped = columns.start - first[1] * width
        target = out.T if transpose else out
        for number, of_blocks in enumerate(factors, first[0]):
            start = max(number * height, rows.start)
            stop = min((number + 1) * height, rows.stop)
            part = self.tensors.read(name, (slice(start, stop), slice(columns.start, columns.stop)))
            factor = np.repeat(of_blocks, width)[skipped : skipped + len(columns)]
            place = target[start - rows.start : stop - rows.start]
            for column in range(0, len(columns), _COLUMNS):
                some = slice(column, column + _COLUMNS)
                values = _DECODED[part[:, some].view(np.uint8)] * factor[some]
                assign(place[:, some], values, tiled=transpose)

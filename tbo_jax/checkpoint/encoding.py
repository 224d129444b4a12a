"""What a checkpoint holds of a quantised weight: its numbers, their factors, and who reads them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.tensors import TensorFolder, assign
from tbo_jax.quantized.array import MIDDLE, STORED_AS, Format

Index = tuple[slice, ...]


class Reader(Protocol):
    """Reads parts of what belongs to a weight of the checkpoint."""

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        """Read what belongs to weight `name`, or a part of it, as `TensorFolder.read_into` does."""


class PartReader(abc.ABC):
    """A `Reader` that makes a part of a matrix anew, and does not read it in place."""

    @abc.abstractmethod
    def read(self, name: str, index: Index | None) -> NDArray[Any]:
        """The part `index` of the matrix that belongs to weight `name`."""

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        """As `Reader.read_into`."""
        part = self.read(name, index)
        out[...] = part.T if transpose else part


@dataclass(frozen=True)
class Encoding:
    """How a weight [..., A, B] is held, its last two dimensions as the checkpoint has them.

    `values` reads the numbers as a `QuantizedArray` of that form holds them, `scales` and `zeros`
    read one for each block.
    """

    form: Format
    values: Reader
    scales: Reader
    scale_dtype: np.dtype[Any]
    zeros: Reader | None = None


@dataclass(frozen=True)
class TensorOf:
    """The tensor that belongs to a weight: its name with `suffix` behind it, or in its place.

    A tensor of other dimensions than `shape` is taken as one of it; such tensors are small, and
    read whole.
    """

    tensors: TensorFolder
    suffix: str = ""
    instead_of: str = ""  # the end of the weight's name that the suffix replaces
    shape: tuple[int, ...] | None = None

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        tensor = name.removesuffix(self.instead_of) + self.suffix
        if self.shape is None or len(self.tensors.info(tensor).shape) == len(self.shape):
            self.tensors.read_into(tensor, out, index, transpose=transpose)
            return
        whole = self.tensors.read(tensor).reshape(self.shape)
        part = whole if index is None else whole[index]
        out[...] = part.T if transpose else part


@dataclass(frozen=True)
class Reblocked:
    """Factors read anew for smaller blocks: each of `new` lies in one of `old`, whole."""

    factors: Reader
    old: tuple[int, int]
    new: tuple[int, int]

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        assert index is not None
        if not out.size:
            return
        *lead, rows, columns = index
        places = [
            np.arange(part.start, part.stop) * new // old
            for part, new, old in zip((rows, columns), self.new, self.old, strict=True)
        ]
        first = [place[0] for place in places]
        taken = [slice(place[0], place[-1] + 1) for place in places]
        target = np.swapaxes(out, -1, -2) if transpose else out
        shape = *target.shape[:-2], *(part.stop - part.start for part in taken)
        read = np.empty(shape, out.dtype)
        self.factors.read_into(name, read, (*lead, *taken))
        row, column = (place - start for place, start in zip(places, first, strict=True))
        target[...] = read[..., row[:, None], column]


def decode_into(
    encoding: Encoding,
    name: str,
    shape: tuple[int, ...],
    out: NDArray[Any],
    index: Index | None,
    *,
    transpose: bool,
) -> None:
    """Write into `out` the numbers that weight `name` of `shape` stands for, or a part of them.

    The float32 products, rounded once to the dtype of `out`. Of what is packed whole bytes are
    read, and trimmed.
    """
    whole = tuple(slice(0, n) for n in shape)
    ranges = [range(*part.indices(n.stop)) for part, n in zip(index or whole, whole, strict=True)]
    if not all(ranges):
        return
    wanted = [slice(r.start, r.stop) for r in ranges]
    form = encoding.form
    read, trim = list(wanted), [slice(0, len(r)) for r in ranges]
    if form.is_packed:
        along = ranges[form.packed]
        read[form.packed] = slice(along.start // 2, -(-along.stop // 2))
        skipped = along.start % 2
        trim[form.packed] = slice(skipped, skipped + len(along))
    values = np.empty([part.stop - part.start for part in read], STORED_AS[form.kind])
    encoding.values.read_into(name, values, tuple(read))
    if form.is_packed:
        values = halves(values, form.packed)[tuple(trim)]
    numbers = as_e2m1(values) if form.kind == "mxfp4" else values.astype(np.float32)
    if encoding.zeros is not None:
        numbers -= _spread(encoding, encoding.zeros, name, wanted)
    elif form.kind == "int4":
        numbers -= MIDDLE
    numbers *= _spread(encoding, encoding.scales, name, wanted)
    assign(out, np.swapaxes(numbers, -1, -2) if transpose else numbers, tiled=transpose)


def _spread(
    encoding: Encoding, reader: Reader, name: str, wanted: list[slice]
) -> NDArray[np.float32]:
    """What `reader` has of each block, for each number."""
    *lead, rows, columns = wanted
    fine = Reblocked(reader, encoding.form.block, (1, 1))
    dtype = np.dtype(np.uint8) if reader is encoding.zeros else encoding.scale_dtype
    read = np.empty([part.stop - part.start for part in wanted], dtype)
    fine.read_into(name, read, (*lead, rows, columns))
    if encoding.form.kind == "mxfp4":
        read = read.view(ml_dtypes.float8_e8m0fnu)
    return read.astype(np.float32)


def as_e2m1(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers that the lower four bits stand for."""
    return bits.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def halves(packed: NDArray[np.uint8], axis: int = -1) -> NDArray[np.uint8]:
    """Bytes -> twice as many along `axis`: the low half of each, then the high one."""
    axis %= packed.ndim
    shape = list(packed.shape)
    shape[axis] *= 2
    return np.stack([packed & 15, packed >> 4], axis=axis + 1).reshape(shape)

"""Reader of a Hugging Face safetensors folder: checked up front, read in bounded memory.

The library `safetensors` checks the headers, but reads the data through ``mmap``. Mapped pages
count as resident memory, and loading would then peak at twice the weights. So the data goes through
plain file reads here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.headers import (
    DTYPES,
    CheckpointError,
    TensorInfo,
    open_file,
    read_exactly,
    read_folder,
)

__all__ = ["CheckpointError", "TensorFolder", "TensorInfo", "assign"]

_FLOATS = frozenset(dtype for code, dtype in DTYPES.items() if "F" in code)
_CHUNK = 8 << 20  # bytes of one temporary buffer: large enough for the disk, small for the cache
_SEEK = 256 << 10  # bytes of a row from which reading a part of it beats reading all of it
_TILE = 256  # rows and columns of one block of a transposed copy: both sides stay in the L2 cache


@dataclass(frozen=True, slots=True)
class TensorFolder:
    """The tensors of a folder. Holds no open file and no data; threads may share it."""

    folder: Path
    _infos: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TensorFolder:
        """Read and check the header of every file of the checkpoint in `folder`.

        ``model.safetensors.index.json`` is used when it exists, else ``model.safetensors``.
        Files that the index does not mention are left alone.

        Raises:
            CheckpointError: a file is missing, truncated, longer than its header says, or not
                safetensors; a dtype is unknown; tensors overlap; the index and the files disagree.
        """
        root = Path(folder)
        try:
            infos = read_folder(root)
        except OSError as error:
            raise CheckpointError(f"{root}: cannot be read: {error.strerror}") from error
        return cls(root, dict(sorted(infos.items())))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor; CheckpointError when there is none of that name."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: the checkpoint has no tensor {name!r}") from None

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> NDArray[Any]:
        """Read a tensor, or the part of it that `index` selects, into a new array of its own dtype.

        `index` holds one slice for each leading dimension (the others are taken whole), with the
        meaning that NumPy gives them; a step other than 1 is refused. A part that is contiguous in
        the file is read alone; for another, rows shorter than 256 KiB are read whole, in chunks.

        Raises:
            ValueError: `index` is not a tuple of slices of step 1, or has more than the tensor.
            CheckpointError: no such tensor, or the file changed since the folder was opened.
        """
        info = self.info(name)
        ranges = _ranges(name, info.shape, index)
        out: NDArray[Any] = np.empty([stop - start for start, stop in ranges], info.dtype)
        self.read_into(name, out, index)
        return out

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: tuple[slice, ...] | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        """Read a tensor, or a part of it (see `read`), into `out`, converting to its dtype.

        `out` may be any writable view. With `transpose` its last two dimensions are those of
        ``tensor[index]`` the other way round. Floating dtypes convert to one another, integers to
        wider integers. Temporary memory is one chunk (8 MiB), however large the tensor.

        Raises:
            ValueError: as for `read`; a wrong or read-only `out`; `transpose` of a tensor of fewer
                than two dimensions; dtypes that do not convert.
            CheckpointError: no such tensor, or the file changed since the folder was opened.
        """
        info = self.info(name)
        ranges = _ranges(name, info.shape, index)
        if transpose and len(info.shape) < 2:
            raise ValueError(f"tensor {name!r}: a shape of {info.shape} does not transpose")
        wanted = tuple(stop - start for start, stop in ranges)
        if transpose:
            wanted = (*wanted[:-2], wanted[-1], wanted[-2])
        if out.shape != wanted:
            raise ValueError(f"tensor {name!r}: out must have shape {wanted}, not {out.shape}")
        if not _converts(info.dtype, out.dtype):
            raise ValueError(f"tensor {name!r}: {info.dtype} does not convert to {out.dtype}")
        if not out.flags.writeable:
            raise ValueError(f"tensor {name!r}: out is read-only")
        if out.size == 0:
            return
        target = out.swapaxes(-1, -2) if transpose else out
        scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        with open_file(info.file) as stream:
            for block in _plan(info.shape, ranges, info.dtype.itemsize):
                part = target[block.target] if info.shape else target.reshape(1)
                size = math.prod(block.shape) * info.dtype.itemsize
                offset = info.offset + block.offset
                if part.dtype == info.dtype and part.nbytes == size and part.flags.c_contiguous:
                    read_exactly(stream, offset, part.reshape(-1).view(np.uint8))
                    continue
                if scratch.size < size:
                    scratch = np.empty(size, np.uint8)
                read_exactly(stream, offset, scratch[:size])
                source = scratch[:size].view(info.dtype).reshape(block.shape)[block.keep]
                assign(part, source, tiled=transpose)


class _Block(NamedTuple):
    """One read: `shape` elements at `offset` bytes, of which `keep` goes to ``result[target]``."""

    offset: int
    shape: tuple[int, ...]
    keep: tuple[slice, ...]
    target: tuple[int | slice, ...]


def _plan(
    shape: tuple[int, ...],
    ranges: tuple[tuple[int, int], ...],
    itemsize: int,
    offset: int = 0,
    at: tuple[int, ...] = (),
) -> Iterator[_Block]:
    """Cut the region `ranges` of a row-major array into reads of at most one chunk each."""
    if not shape:
        shape, ranges = (1,), ((0, 1),)
    (start, stop), inner = ranges[0], ranges[1:]
    row = math.prod(shape[1:]) * itemsize
    partial = inner != tuple((0, size) for size in shape[1:])
    if inner and (row > _CHUNK or (partial and (stop - start == 1 or row >= _SEEK))):
        for i in range(start, stop):
            yield from _plan(shape[1:], inner, itemsize, offset + i * row, (*at, i - start))
        return
    keep = (slice(None), *(slice(*bounds) for bounds in inner))
    step = max(1, _CHUNK // row)
    for first in range(start, stop, step):
        rows = min(step, stop - first)
        target: tuple[int | slice, ...] = (*at, slice(first - start, first - start + rows))
        yield _Block(offset + first * row, (rows, *shape[1:]), keep, target)


def assign(part: NDArray[Any], source: NDArray[Any], *, tiled: bool) -> None:
    """``part[...] = source`` with conversion; `tiled` when the two run through memory crosswise."""
    if not tiled or part.ndim < 2:
        part[...] = source
        return
    if part.ndim > 2:
        for one, other in zip(part, source, strict=True):
            assign(one, other, tiled=True)
        return
    # Converting a tile first, and transposing what then lies in the cache, takes half the time of
    # assigning the tile at once, and an eighth of assigning the whole.
    rows, columns = part.shape
    for i in range(0, rows, _TILE):
        for j in range(0, columns, _TILE):
            tile = source[i : i + _TILE, j : j + _TILE].astype(part.dtype)
            part[i : i + _TILE, j : j + _TILE] = tile


def _ranges(
    name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None
) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each dimension, with ``0 <= start <= stop <= size``."""
    slices = () if index is None else index
    if not isinstance(slices, tuple) or not all(isinstance(part, slice) for part in slices):
        raise ValueError(f"tensor {name!r}: index must be a tuple of slices, not {index!r}")
    if len(slices) > len(shape):
        raise ValueError(f"tensor {name!r}: {len(slices)} slices for shape {shape}")
    ranges = []
    for part, size in zip(slices, shape, strict=False):
        if part.step not in (None, 1):
            raise ValueError(f"tensor {name!r}: the step of a slice must be 1, not {part.step}")
        start, stop, _ = part.indices(size)
        ranges.append((start, max(start, stop)))
    return (*ranges, *((0, size) for size in shape[len(slices) :]))


def _converts(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    if source == target:
        return True
    if source in _FLOATS or target in _FLOATS:
        return source in _FLOATS and target in _FLOATS
    return np.can_cast(source, target, "safe")

"""Reader of a Hugging Face safetensors folder: checked up front, read in bounded memory.

Format (safetensors, Hugging Face): 8 bytes little-endian header length N, N bytes of JSON that map
a tensor's name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, then the data, row-major
and little-endian, with no gap. A sharded checkpoint adds ``model.safetensors.index.json``, whose
``weight_map`` maps a tensor's name to its file.

Opening a folder reads the headers only and checks all of them, so that a broken download fails
before any weight is placed. Reads go through plain file reads and not through ``mmap``: mapped
pages count as resident memory, and loading would then peak at twice the weights.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_FLOATS = frozenset(dtype for code, dtype in _DTYPES.items() if "F" in code)

_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
_MAX_NDIM = 32  # what every NumPy can hold
_CHUNK = 8 << 20  # bytes of one temporary buffer: large enough for the disk, small for the cache
_SEEK = 256 << 10  # bytes of a row from which reading a part of it beats reading all of it
_TILE = 256  # rows and columns of one block of a transposed copy: both sides stay in the L2 cache


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says where and what was expected."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` in elements, `offset` in bytes from the start of `file`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


# --- Headers and index: everything that is checked before a weight is read ------------------------


def _read_folder(root: Path) -> dict[str, TensorInfo]:
    if (root / INDEX_FILE).exists():
        return _read_shards(root, root / INDEX_FILE)
    if (root / SINGLE_FILE).exists():
        return _read_header(root / SINGLE_FILE)
    if not root.is_dir():
        raise CheckpointError(f"{root}: not a folder")
    found = ", ".join(sorted(path.name for path in root.iterdir())[:20]) or "nothing"
    raise CheckpointError(f"{root}: expected {INDEX_FILE} or {SINGLE_FILE}, found {found}")


def _read_shards(root: Path, index: Path) -> dict[str, TensorInfo]:
    with _open(index) as stream:
        weight_map = _parse_object(stream.readall(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a non-empty object 'weight_map'")
    for name, shard in weight_map.items():
        # A name with a folder in it could point outside the checkpoint.
        beside = isinstance(shard, str) and Path(shard).name == shard
        if not beside or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name!r}: expected a .safetensors file beside it, not {shard!r}"
            )
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if not (root / shard).exists():
            lost = sum(1 for file in weight_map.values() if file == shard)
            raise CheckpointError(
                f"{root / shard}: missing; {index.name} lists {lost} tensors in it"
            )
        for name, info in _read_header(root / shard).items():
            if name in infos:
                raise CheckpointError(
                    f"{root}: tensor {name!r} is in both {infos[name].file.name} and {shard}"
                )
            if name not in weight_map:
                raise CheckpointError(f"{root / shard}: {index.name} does not list tensor {name!r}")
            infos[name] = info
    for name, shard in weight_map.items():
        if name not in infos or infos[name].file.name != shard:
            where = f"; it is in {infos[name].file.name}" if name in infos else ""
            raise CheckpointError(
                f"{root / shard}: tensor {name!r} is missing, {index.name} lists it here{where}"
            )
    return infos


def _read_header(path: Path) -> dict[str, TensorInfo]:
    with _open(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{path}: truncated: {size} bytes, a header length takes 8")
        prefix = _read_bytes(stream, 0, 8)
        length = int.from_bytes(prefix, "little")
        if prefix == b"version ":
            raise CheckpointError(f"{path}: a Git LFS pointer, not the weights: run 'git lfs pull'")
        if not 2 <= length <= _MAX_HEADER:
            raise CheckpointError(
                f"{path}: not safetensors: header length {length:,}, expected 2 to {_MAX_HEADER:,}"
            )
        if length > size - 8:
            raise CheckpointError(
                f"{path}: truncated: header length {length:,} bytes, the file has {size - 8:,}"
            )
        header = _parse_object(_read_bytes(stream, 8, length), f"{path}: the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: expected '__metadata__' to map strings to strings")
    start = 8 + length
    infos = {name: _parse_entry(path, name, entry, start) for name, entry in header.items()}
    _check_layout(path, infos, start, size)
    return infos


def _parse_entry(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: expected dtype, shape and data_offsets, not {reprlib.repr(entry)}"
        )
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        known = ", ".join(_DTYPES)
        raise CheckpointError(
            f"{where}: unknown dtype {reprlib.repr(code)}, expected one of {known}"
        )
    if not _is_sizes(shape) or len(shape) > _MAX_NDIM:
        raise CheckpointError(
            f"{where}: expected a shape, {_MAX_NDIM}-D at most, not {reprlib.repr(shape)}"
        )
    # NumPy refuses a shape whose non-zero sizes overflow, even where another size is zero.
    if math.prod(size for size in shape if size) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{where}: shape {shape} is larger than any memory")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: expected data_offsets [begin, end], not {reprlib.repr(offsets)}"
        )
    info = TensorInfo(dtype, tuple(shape), path, start + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} hold {offsets[1] - offsets[0]:,} bytes, "
            f"expected {info.nbytes:,} for {code} {shape}"
        )
    return info


def _check_layout(path: Path, infos: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """The tensors must cover the bytes [start, size) of the file, without overlap or gap."""
    spans = sorted((info.offset, info.offset + info.nbytes, name) for name, info in infos.items())
    end = max((stop for _, stop, _ in spans), default=start)
    if end != size:
        fault = "truncated" if end > size else "trailing bytes"
        raise CheckpointError(
            f"{path}: {fault}: header promises {end - start:,} bytes of data, "
            f"the file has {size - start:,}"
        )
    for (_, stop, before), (begin, _, name) in pairwise([(start, start, ""), *spans]):
        if begin < stop:
            raise CheckpointError(f"{path}: tensors {before!r} and {name!r} overlap")
        if begin > stop:
            raise CheckpointError(f"{path}: {begin - stop:,} unused bytes before tensor {name!r}")


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _parse_object(raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            key, count = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"key {key!r} occurs {count} times")
        return value

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


# --- File access ----------------------------------------------------------------------------------


def _open(path: Path) -> FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


def _read_bytes(stream: FileIO, offset: int, size: int) -> bytes:
    data = np.empty(size, np.uint8)
    _read_exactly(stream, offset, data)
    return data.tobytes()


def _read_exactly(stream: FileIO, offset: int, data: NDArray[np.uint8]) -> None:
    """Fill `data` (contiguous) from `offset`; the system may give less than was asked for."""
    view = data.data
    done = 0
    try:
        stream.seek(offset)
        while done < len(view):
            count = stream.readinto(view[done:])
            if not count:
                raise CheckpointError(f"{stream.name}: truncated at byte {offset + done:,}")
            done += count
    except OSError as error:
        raise CheckpointError(f"{stream.name}: cannot be read: {error.strerror}") from error


# --- Tensors --------------------------------------------------------------------------------------


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
            infos = _read_folder(root)
        except OSError as error:
            raise CheckpointError(f"{root}: cannot be read: {error.strerror}") from error
        return cls(root, dict(sorted(infos.items())))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(self._infos)

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

        `out` may be any writable view. With `transpose`, for a 2-D tensor, `out` has the shape of
        ``tensor[index].T``. Floating dtypes convert to one another, integers to wider integers.
        Temporary memory is one chunk (8 MiB), however large the tensor.

        Raises:
            ValueError: as for `read`; a wrong or read-only `out`; `transpose` of a tensor that is
                not 2-D; dtypes that do not convert.
            CheckpointError: no such tensor, or the file changed since the folder was opened.
        """
        info = self.info(name)
        ranges = _ranges(name, info.shape, index)
        if transpose and len(info.shape) != 2:
            raise ValueError(f"tensor {name!r}: only 2-D tensors transpose, not {info.shape}")
        target = out.T if transpose else out
        expected = tuple(stop - start for start, stop in ranges)
        if target.shape != expected:
            wanted = expected[::-1] if transpose else expected
            raise ValueError(f"tensor {name!r}: out must have shape {wanted}, not {out.shape}")
        if not _converts(info.dtype, out.dtype):
            raise ValueError(f"tensor {name!r}: {info.dtype} does not convert to {out.dtype}")
        if not out.flags.writeable:
            raise ValueError(f"tensor {name!r}: out is read-only")
        if out.size == 0:
            return
        scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        with _open(info.file) as stream:
            for block in _plan(info.shape, ranges, info.dtype.itemsize):
                part = target[block.target] if info.shape else target.reshape(1)
                size = math.prod(block.shape) * info.dtype.itemsize
                offset = info.offset + block.offset
                if part.dtype == info.dtype and part.nbytes == size and part.flags.c_contiguous:
                    _read_exactly(stream, offset, part.reshape(-1).view(np.uint8))
                    continue
                if scratch.size < size:
                    scratch = np.empty(size, np.uint8)
                _read_exactly(stream, offset, scratch[:size])
                source = scratch[:size].view(info.dtype).reshape(block.shape)[block.keep]
                _assign(part, source, tiled=transpose)


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


def _assign(part: NDArray[Any], source: NDArray[Any], *, tiled: bool) -> None:
    """``part[...] = source`` with conversion; `tiled` when the two run through memory crosswise."""
    if not tiled or part.ndim != 2:
        part[...] = source
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

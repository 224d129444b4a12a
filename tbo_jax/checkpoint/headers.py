"""Headers of a safetensors folder: everything that is checked before a weight is read.

Format (safetensors, Hugging Face): 8 bytes little-endian header length N, N bytes of JSON that map
a tensor's name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, then the data, row-major
and little-endian, with no gap. A sharded checkpoint adds ``model.safetensors.index.json``, whose
``weight_map`` maps a tensor's name to its file.

A broken download thus fails before any weight is placed.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: Mapping[str, np.dtype[Any]] = {
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

_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
_MAX_NDIM = 32  # what every NumPy can hold


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


def read_folder(root: Path) -> dict[str, TensorInfo]:
    if (root / INDEX_FILE).exists():
        return _read_shards(root, root / INDEX_FILE)
    if (root / SINGLE_FILE).exists():
        return _read_header(root / SINGLE_FILE)
    if not root.is_dir():
        raise CheckpointError(f"{root}: not a folder")
    found = ", ".join(sorted(path.name for path in root.iterdir())[:20]) or "nothing"
    raise CheckpointError(f"{root}: expected {INDEX_FILE} or {SINGLE_FILE}, found {found}")


def _read_shards(root: Path, index: Path) -> dict[str, TensorInfo]:
    with open_file(index) as stream:
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
    with open_file(path) as stream:
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
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        known = ", ".join(DTYPES)
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


def open_file(path: Path) -> FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


def _read_bytes(stream: FileIO, offset: int, size: int) -> bytes:
    data = np.empty(size, np.uint8)
    read_exactly(stream, offset, data)
    return data.tobytes()


def read_exactly(stream: FileIO, offset: int, data: NDArray[np.uint8]) -> None:
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

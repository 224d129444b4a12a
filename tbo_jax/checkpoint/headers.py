"""Headers of a safetensors folder: everything that is checked before a weight is read.

A safetensors file is 8 bytes with the length N of its header (little-endian), N bytes of JSON with
the dtype, the shape and the place of each tensor, and the data, row-major and little-endian, with
no gap. The library `safetensors` reads and checks the header. A sharded checkpoint adds
``model.safetensors.index.json``, whose ``weight_map`` maps a tensor's name to its file.

A broken download thus fails before any weight is placed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from tbo_jax.host.json_files import parse_json_object, read_json_object

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8  # of the length of the header, before it

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
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
    """Place, dtype and shape of every tensor of the checkpoint in `root`, by its name.

    Raises:
        CheckpointError: see `TensorFolder.open`.
    """
    single = root / SINGLE_FILE
    if (root / INDEX_FILE).exists():
        weight_map = _read_index(root / INDEX_FILE)
        files = Counter(weight_map.values())
        lost = next((file for file in sorted(files) if not (root / file).exists()), None)
        if lost is None:
            if single.exists() and SINGLE_FILE not in files:
                logger.warning(
                    "%s is not read: the files that %s lists are all there", single, INDEX_FILE
                )
            return _read_shards(root, weight_map)
        if not single.exists():
            raise CheckpointError(
                f"{root / lost}: missing; {INDEX_FILE} lists {files[lost]} tensors in it"
            )
        logger.warning("%s lists %s, which is not there: %s is read", INDEX_FILE, lost, single)
    if single.exists():
        return _read_header(single)
    if not root.is_dir():
        raise CheckpointError(f"{root}: not a folder")
    found = ", ".join(sorted(path.name for path in root.iterdir())[:20]) or "nothing"
    raise CheckpointError(f"{root}: expected {INDEX_FILE} or {SINGLE_FILE}, found {found}")


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by its name."""
    try:
        weight_map = read_json_object(index).get("weight_map")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a non-empty object 'weight_map'")
    for name, shard in weight_map.items():
        # A name with a folder in it could point outside the checkpoint.
        beside = isinstance(shard, str) and Path(shard).name == shard
        if not beside or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name!r}: expected a .safetensors file beside it, not {shard!r}"
            )
    return weight_map


def _read_shards(root: Path, weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        for name, info in _read_header(root / shard).items():
            if name in infos:
                raise CheckpointError(
                    f"{root}: tensor {name!r} is in both {infos[name].file.name} and {shard}"
                )
            if name not in weight_map:
                raise CheckpointError(f"{root / shard}: {INDEX_FILE} does not list tensor {name!r}")
            infos[name] = info
    for name, shard in weight_map.items():
        if name not in infos or infos[name].file.name != shard:
            where = f"; it is in {infos[name].file.name}" if name in infos else ""
            raise CheckpointError(
                f"{root / shard}: tensor {name!r} is missing, {INDEX_FILE} lists it here{where}"
            )
    return infos


def _read_header(path: Path) -> dict[str, TensorInfo]:
    offset = _start_of_data(path)
    infos: dict[str, TensorInfo] = {}
    header = np.empty(offset - LENGTH_BYTES, np.uint8)
    with open_file(path) as stream:
        read_exactly(stream, LENGTH_BYTES, header)
    try:
        # The library maps the file, but touches no page behind the header.
        with safe_open(path, "numpy") as file:
            for name in file.offset_keys():  # as they lie in the file, without a gap
                tensor = file.get_slice(name)
                code, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                if code not in DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name!r}: unknown dtype {code!r}, expected one of "
                        f"{', '.join(DTYPES)}"
                    )
                infos[name] = TensorInfo(DTYPES[code], shape, path, offset)
                offset += infos[name].nbytes
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: truncated or no safetensors file (was its download cut short?): {error}"
        ) from error
    try:
        # Refuses a name that occurs twice, of which the library takes the last.
        parse_json_object(header.tobytes(), f"{path}: header")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return infos


def _start_of_data(path: Path) -> int:
    """Bytes before the data; names what people meet most often in place of a safetensors file."""
    start = np.zeros(LENGTH_BYTES, np.uint8)
    with open_file(path) as stream:
        size = path.stat().st_size
        if size >= len(start):
            read_exactly(stream, 0, start)
    prefix = start.tobytes()
    if prefix == b"version ":
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights: run 'git lfs pull'")
    header = len(prefix) + int.from_bytes(prefix, "little")
    if size < header:
        raise CheckpointError(
            f"{path}: truncated: it has {size:,} bytes, its header alone takes {header:,}"
        )
    return header


# --- File access ----------------------------------------------------------------------------------


def open_file(path: Path) -> FileIO:
    """The file, unbuffered, for reading. CheckpointError if it cannot be opened."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


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

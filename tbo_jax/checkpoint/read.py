"""Parameters from their files to the devices: each part read once, in bounded host memory."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from tbo_jax.checkpoint.encoding import Reader
from tbo_jax.checkpoint.names import Source

Key = TypeVar("Key", bound=Hashable)
Bounds = tuple[tuple[int, int], ...]  # start, stop of each dimension

_THREADS = 4  # at most; a core converts about 1 GB/s, less than disks and links carry
# Bytes of a part that an accelerator is given at once. A stack of all layers may be larger than
# what the host has.
_AT_ONCE = 1 << 29


@dataclass(frozen=True)
class Wanted:
    """A parameter that is to be read, and where it is to lie."""

    weights: Reader
    sources: Sequence[Source]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding

    def bytes_of(self, bounds: Bounds) -> int:
        return math.prod(stop - start for start, stop in bounds) * self.dtype.itemsize

    @property
    def parts(self) -> dict[Bounds, list[jax.Device]]:
        """The parts that this process's devices have, and who has each."""
        parts: dict[Bounds, list[jax.Device]] = {}
        placed = self.sharding.addressable_devices_indices_map(self.shape)
        for device, index in placed.items():
            assert index is not None
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))
            parts.setdefault(bounds, []).append(device)
        return parts

    @property
    def boxes(self) -> dict[Bounds, list[Bounds]]:
        """What is read at once, and the parts in it.

        A part that lies in the file in one piece is read alone. Of another the rows are read whole,
        and so the columns of all devices are read together.
        """
        boxes: dict[Bounds, list[Bounds]] = {}
        alone = set(range(len(self.shape))).intersection(*map(_leading_axes, self.sources))
        for part in self.parts:
            whole = zip(part, self.shape, strict=True)
            box = tuple(b if axis in alone else (0, n) for axis, (b, n) in enumerate(whole))
            boxes.setdefault(box, []).append(part)
        return {(box if len(parts) > 1 else parts[0]): parts for box, parts in boxes.items()}

    @property
    def host_bytes(self) -> int:
        """Most bytes of the host that reading takes, beside what is placed."""
        most = 0
        for box, parts in self.boxes.items():
            piece = self._pieces(box)[0]  # no other is larger
            cut = parts[0] if len(parts) > 1 else ()
            of_part = self.bytes_of((min(piece[0], cut[0], key=_length), *cut[1:])) if cut else 0
            most = max(most, self.bytes_of(piece) + of_part)
        return most

    def read(self) -> jax.Array:
        """The parameter on its devices; the host holds nothing of it any more."""
        devices: dict[Bounds, list[jax.Device]] = self.parts
        placed: dict[jax.Device, jax.Array] = {}
        for box, parts in self.boxes.items():
            for piece in self._pieces(box):
                read = self._read_box(piece)
                for part in parts:
                    inner = _common(part, piece)
                    if inner is not None:
                        values = self._cut(read, piece, inner)
                        for device in devices[part]:
                            placed[device] = self._put(values, inner, part, device, placed)
                        # Wait, so that the host's copy is gone before the next one is made.
                        jax.block_until_ready([placed[device] for device in devices[part]])
        order = self.sharding.addressable_devices_indices_map(self.shape)
        arrays = [placed[device] for device in order]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)

    def _cut(self, read: NDArray[Any], piece: Bounds, inner: Bounds) -> NDArray[Any]:
        """What is `inner` of a piece that was read; the piece itself where that is all of it."""
        if inner == piece:
            return read
        out = _aligned_empty([stop - start for start, stop in inner], self.dtype)
        out[...] = read[
            tuple(slice(a - o, z - o) for (a, z), (o, _) in zip(inner, piece, strict=True))
        ]
        return out

    def _put(
        self,
        values: NDArray[Any],
        inner: Bounds,
        part: Bounds,
        device: jax.Device,
        placed: Mapping[jax.Device, jax.Array],
    ) -> jax.Array:
        """The part on a device with `values` in the place `inner`, which may be all of it."""
        if inner == part:
            return jax.device_put(values, device)
        shape = tuple(stop - start for start, stop in part)
        before = placed[device] if device in placed else jnp.zeros(shape, self.dtype, device=device)
        return _write(before, values, inner[0][0] - part[0][0])

    def _pieces(self, bounds: Bounds) -> list[Bounds]:
        """`bounds` cut along the first dimension, so that each is of `_AT_ONCE` bytes if it can be.

        Not on CPU, which takes over the array that is read.
        """
        platform = self.sharding.mesh.devices.flat[0].platform
        (start, stop), *inner = bounds or ((0, 1),)
        if _takes_over(platform) or len(self.shape) < 2 or self.bytes_of(bounds) <= _AT_ONCE:
            return [bounds]
        step = max(1, (stop - start) * _AT_ONCE // self.bytes_of(bounds))
        return [((i, min(i + step, stop)), *inner) for i in range(start, stop, step)]

    def _read_box(self, bounds: Bounds) -> NDArray[Any]:
        out = _aligned_empty([stop - start for start, stop in bounds], self.dtype)
        for source in self.sources:
            _read_source(self.weights, source, out, bounds)
        return out


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _common(one: Bounds, other: Bounds) -> Bounds | None:
    """What lies in both; None if nothing does."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def _leading_axes(source: Source) -> set[int]:
    """Axes of a parameter along which a part of it is one piece of the file, or of none."""
    lead, rank = len(source.at), len(source.at) + len(source.shape)
    first = rank - 1 if source.transpose and len(source.shape) == 2 else lead
    return {*range(lead), first}


def read_parameters(wanted: Mapping[Key, Wanted]) -> Iterator[tuple[Key, jax.Array]]:
    """Read all, each given when it is on its devices, in the order in which that comes to be.

    Several threads read, so that one converts while another waits for the disk or the link. Of
    what is not placed the host holds at most two of the largest parameter.
    """
    if not wanted:
        return
    budget = 2 * max(w.bytes_of(tuple((0, n) for n in w.shape)) for w in wanted.values())
    threads = min(_THREADS, os.cpu_count() or 1)
    running: dict[Future[jax.Array], tuple[Key, int]] = {}
    held = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="tbo-jax-read") as pool:
        try:
            for key, one in wanted.items():
                cost = one.host_bytes
                while running and (held + cost > budget or len(running) == threads):
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        name, freed = running.pop(future)
                        held -= freed
                        yield name, future.result()
                running[pool.submit(one.read)] = key, cost
                held += cost
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future)[0], future.result()
        finally:
            for future in running:
                future.cancel()


def _takes_over(platform: str) -> bool:
    """Whether devices of a platform use the host's array as it is."""
    return platform == "cpu"


@partial(jax.jit, donate_argnums=0)
def _write(stack: jax.Array, part: jax.Array, first: int) -> jax.Array:
    """`part` in place of the rows of `stack` from `first` on."""
    return jax.lax.dynamic_update_slice_in_dim(stack, part, first, 0)


def _aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array that JAX takes over on CPU without copying it, as its alignment of 64 bytes allows.

    Without it each parameter is there twice while it is placed: an expert weight of one layer can
    be a third of a layer.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _read_source(
    weights: Reader, source: Source, out: np.ndarray, bounds: Sequence[tuple[int, int]]
) -> None:
    """The part of a tensor that falls into the shard `bounds` of the parameter, into `out`."""
    lead = len(source.at)
    for entry, (start, stop) in zip(source.at, bounds, strict=False):
        if not start <= entry < stop:
            return
    target = out[tuple(e - b[0] for e, b in zip(source.at, bounds, strict=False))]
    offsets = [0] * (len(source.shape) - 1) + [source.column]
    inner = [
        (max(start, offset), min(stop, offset + size))
        for (start, stop), offset, size in zip(bounds[lead:], offsets, source.shape, strict=True)
    ]
    if any(start >= stop for start, stop in inner):
        return
    place = tuple(slice(a - b[0], z - b[0]) for (a, z), b in zip(inner, bounds[lead:], strict=True))
    index = tuple(slice(a - o, z - o) for (a, z), o in zip(inner, offsets, strict=True))
    part = target[place][(None,) * source.leading]
    if source.alternating:
        _read_alternating(weights, source, part, index)
    else:
        weights.read_into(source.name, part, source.part(index), transpose=source.transpose)


def _read_alternating(
    weights: Reader, source: Source, out: np.ndarray, index: tuple[slice, ...]
) -> None:
    """The part `index` of a parameter whose columns alternate in the file, an expert at a time."""
    experts, *inner, columns = index
    half = source.shape[-1] // 2
    for number, entry in enumerate(range(experts.start, experts.stop)):
        taken = (slice(entry, entry + 1), *inner)
        whole = np.empty((1, *out.shape[1:-1], 2 * half), out.dtype)
        weights.read_into(source.name, whole, (*taken, slice(0, 2 * half)))
        for turn, first in enumerate((0, half)):
            start, stop = max(columns.start, first), min(columns.stop, first + half)
            if start < stop:
                place = slice(start - columns.start, stop - columns.start)
                out[number, ..., place] = whole[
                    0, ..., 2 * (start - first) + turn : 2 * (stop - first) : 2
                ]

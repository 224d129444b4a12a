"""How a parameter is held in memory: as one array, or quantised as its checkpoint has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.checkpoint.encoding import Encoding, Reader, Reblocked
from tbo_jax.checkpoint.names import Source
from tbo_jax.checkpoint.quantized import WeightFormat
from tbo_jax.checkpoint.read import Wanted
from tbo_jax.parallel.sharding import parameter_spec
from tbo_jax.quantized.array import Format, QuantizedArray

_PLAIN = "array"


@dataclass(frozen=True)
class Held:
    """A parameter that is to be read: its parts, and what they mean together."""

    parts: Mapping[str, Wanted]  # "array", or the fields of a `QuantizedArray`
    format: Format | None

    def together(self, read: Mapping[str, jax.Array]) -> jax.Array | QuantizedArray:
        """The parameter, from its parts."""
        if self.format is None:
            return read[_PLAIN]
        return QuantizedArray(read["values"], read["scales"], read.get("zeros"), self.format)


def hold(
    path: Sequence[object],
    variable: nnx.Variable,
    sources: Sequence[Source],
    weights: WeightFormat,
    mesh: Mesh,
    decode: bool,
) -> Held:
    """What is to be read of a parameter.

    It is quantised where the layer can compute with that (metadata `inputs`), all that it is made
    of is held alike, and devices get whole bytes of it; otherwise it is decoded, as with `decode`.
    """
    spec = parameter_spec(path, variable, mesh)
    sharding = NamedSharding(mesh, spec)
    plain = Held(
        {_PLAIN: Wanted(weights, sources, variable.shape, np.dtype(variable.dtype), sharding)}, None
    )
    inputs = variable.get_metadata().get("inputs")
    if inputs is None or decode:
        return plain
    encodings = [weights.encoding(s.name, s.tensor_shape, _turned(s, inputs)) for s in sources]
    first = encodings[0]
    if first is None or any(e is None or _kind(e) != _kind(first) for e in encodings):
        return plain
    stored = _of_source(sources[0], first.form)
    ways = [_ways(spec, mesh, variable.ndim, axis) for axis in (-2, -1)]
    blocks = tuple(
        math.gcd(*(_block(s, stored.block[axis], axis, variable.shape, n) for s in sources))
        for axis, n in zip((-2, -1), ways, strict=True)
    )
    form = replace(stored, block=(blocks[0], blocks[1]))
    if any(s.alternating for s in sources) and form.block[1] != 1:
        return plain  # a block would have columns of both projections
    units = [1, 1]
    if form.is_packed:
        units[form.packed] = 2
        if variable.shape[form.packed] % (2 * ways[form.packed]):
            return plain
        if any(_uneven(s, form.packed) for s in sources):
            return plain
    whole = QuantizedArray.abstract(
        form, variable.shape, first.scale_dtype, zeros=first.zeros is not None
    )
    placed = whole.with_specs(spec)
    parts = {}
    for name in ("values", "scales", "zeros"):
        shape = getattr(whole, name)
        if shape is None:
            continue
        read: Reader = getattr(first, name)
        of_block = units if name == "values" else list(form.block)
        if name != "values":
            old, new = first.form.block, _of_source(sources[0], form).block
            read = read if old == new else Reblocked(read, old, new)
        parts[name] = Wanted(
            read,
            [_in_units(s, of_block) for s in sources],
            shape.shape,
            np.dtype(shape.dtype),
            NamedSharding(mesh, getattr(placed, name)),
        )
    return Held(parts, form)


def _kind(encoding: Encoding) -> Any:
    return encoding.form, encoding.scale_dtype, encoding.zeros is None


def _turned(source: Source, axis: int) -> int:
    """Which of the last two dimensions of the checkpoint's weight is `axis` of the parameter."""
    return -3 - axis if source.transpose else axis


def _of_source(source: Source, form: Format) -> Format:
    """The form of the checkpoint's weight as that of the parameter, or the other way round."""
    return form.turned() if source.transpose else form


def _ways(spec: PartitionSpec, mesh: Mesh, ndim: int, axis: int) -> int:
    """Over how many devices a dimension is shared out."""
    entry = spec[ndim + axis] if len(spec) > ndim + axis else None
    names = () if entry is None else (entry if isinstance(entry, tuple) else (entry,))
    return math.prod(mesh.shape[name] for name in names)


def _block(source: Source, stored: int, axis: int, shape: tuple[int, ...], ways: int) -> int:
    """Numbers of a parameter along `axis` that can share a factor.

    As many as in the checkpoint, `stored`, unless some of a block are those of another matrix, or
    another device's: then as many as divide both.
    """
    size = source.shape[axis]
    whole = source.of_rows if axis == -2 and source.of_rows is not None else size
    cuts = []
    if axis == -1 and size != shape[-1]:
        cuts += [source.column, size]
    if whole != size and stored < whole:
        cuts += [source.row, size]
    chosen = size if stored >= whole else stored
    if ways > 1 and -(-shape[axis] // chosen) > 1:
        cuts.append(shape[axis] // ways)
    for cut in cuts:
        if cut % chosen:
            chosen = math.gcd(chosen, cut)
    return chosen


def _uneven(source: Source, axis: int) -> bool:
    """Whether a byte would hold a number of another matrix."""
    return bool(source.shape[axis] % 2 or (axis == -1 and source.column % 2) or source.row % 2)


def _in_units(source: Source, units: Sequence[int]) -> Source:
    """The source of what there is one of for so many rows and columns of a parameter."""
    *lead, rows, columns = source.shape
    return replace(
        source,
        shape=(*lead, -(-rows // units[0]), -(-columns // units[1])),
        column=source.column // units[1],
        row=source.row // units[0],
        of_rows=None if source.of_rows is None else -(-source.of_rows // units[0]),
    )

"""The mesh of the devices, and which parameter is sharded over which of its axes.

| axis | over it |
|---|---|
| `nodes` | data-parallel attention; what crosses it takes the slow link |
| `ranks` | data-parallel attention, within a node |
| `tensor` | attention and feed-forward of one rank, by heads and by features (Megatron-LM) |

Experts are sharded over all three. A rank, which has a batch and a cache of its own, is a place on
the first two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec, Sharding

from tbo_jax.overlap.checks import whole_number
from tbo_jax.quantized.array import QuantizedArray

NODES = "nodes"
RANKS = (NODES, "ranks")
TENSOR = "tensor"
DEVICES = (*RANKS, TENSOR)


@dataclass(frozen=True)
class Shard:
    """How a parameter is shared out: its metadata `shard` (`nnx.Param(value, shard=Shard(...))`).

    Over the devices of the axis, along `dimension`, which holds so many `units` (experts, heads,
    features) that stay whole. Fewer key/value heads than devices are not shared out, but there on
    each device, which takes the one that it needs.
    """

    axis: Literal["experts", "tensor"]
    dimension: int
    units: int


def first_devices(devices: Sequence[jax.Device], count: int | None) -> Sequence[jax.Device]:
    """The first `count` of `devices`, or all; ValueError for more than there are, or none."""
    wanted = len(devices) if count is None else whole_number("num_devices", count, 1)
    if wanted > len(devices):
        raise ValueError(
            f"{wanted} devices were asked for, {len(devices)} exist on platform "
            f"{devices[0].platform!r}: expected 1 to {len(devices)}"
        )
    return devices[:wanted]


def make_mesh(
    num_devices: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    tensor: int = 1,
    nodes: int = 1,
) -> Mesh:
    """A mesh of the first `num_devices` devices (default all), with the axes of this module.

    Args:
        num_devices: nodes x ranks x tensor.
        devices: to choose from, those of a node one after another; default all there are.
        tensor: devices that share the attention and the feed-forward of one rank; neighbours.
        nodes: groups of devices with a slower link between them.

    Raises:
        ValueError: fewer devices exist, they do not divide, or processes have more than others.
    """
    devices = first_devices(jax.devices() if devices is None else devices, num_devices)
    for name, size in {"tensor": tensor, "nodes": nodes}.items():
        whole_number(name, size, 1)
    of_process = Counter(device.process_index for device in devices)
    if len(set(of_process.values())) > 1:
        raise ValueError("processes with different numbers of devices: expected as many in each")
    if len(devices) % (nodes * tensor):
        raise ValueError(
            f"{len(devices)} device(s) do not divide into {nodes} node(s) with {tensor}-way tensor "
            f"parallelism: expected a multiple of {nodes * tensor}"
        )
    return Mesh(np.array(devices).reshape(nodes, -1, tensor), DEVICES)


def num_ranks(mesh: Mesh) -> int:
    """R, how many ranks have a batch of their own."""
    return mesh.size // mesh.shape[TENSOR]


def parameter_spec(path: Sequence[object], parameter: nnx.Variable, mesh: Mesh) -> PartitionSpec:
    """How a parameter is laid out over `mesh`; one that does not say is replicated.

    Of one that is quantised it is that of the whole: see `QuantizedArray.with_specs`.
    """
    shard: Shard | None = parameter.get_metadata().get("shard")
    if shard is None:
        return PartitionSpec()
    if shard.axis == "tensor" and shard.units % mesh.shape[TENSOR]:
        return PartitionSpec()
    # Scanned layers have an axis of layers in front.
    before = [None] * (shard.dimension + ("stacked" in path))
    return PartitionSpec(*before, DEVICES if shard.axis == "experts" else TENSOR)


def bytes_on_device(leaf: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> int:
    """Bytes that each device has of an array that is so shared out."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def leaf_specs(path: Sequence[object], parameter: nnx.Variable, mesh: Mesh) -> list[PartitionSpec]:
    """`parameter_spec` for each array that a parameter is made of: one, or those of a quantised."""
    spec, value = parameter_spec(path, parameter, mesh), parameter.get_raw_value()
    if not isinstance(value, QuantizedArray):
        return [spec]
    parts = value.with_specs(spec)
    return jax.tree.leaves(parts, is_leaf=lambda part: isinstance(part, PartitionSpec))

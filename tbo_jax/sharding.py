"""The mesh of the ranks, and which parameter is sharded over it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from tbo_jax.layers.mlp import EXPERT_AXIS

RANKS = "ranks"  # the mesh axis: attention is data-parallel over it, experts are sharded over it


def make_mesh(num_devices: int | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A 1-D mesh of the first `num_devices` devices (default all).

    Raises:
        ValueError: fewer devices exist.
    """
    devices = jax.devices() if devices is None else devices
    wanted = len(devices) if num_devices is None else num_devices
    if not 1 <= wanted <= len(devices):
        raise ValueError(
            f"{wanted} devices were asked for, {len(devices)} exist on platform "
            f"{devices[0].platform!r}: expected 1 to {len(devices)}"
        )
    return Mesh(devices[:wanted], (RANKS,))


def parameter_spec(path: Sequence[object], parameter: nnx.Variable) -> PartitionSpec:
    """How a parameter is laid out over `RANKS`: experts along their axis, all else replicated."""
    if parameter.get_metadata().get("sharded_over") != EXPERT_AXIS:
        return PartitionSpec()
    # Scanned layers have an axis of layers before the axis of experts.
    return PartitionSpec(None, RANKS) if "stacked" in path else PartitionSpec(RANKS)

"""Attention kernels compiled for every kind of GPU: none asks for more shared memory than it has.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU. Run with jax 0.10.2: all pass.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.schedule.targets import Target, find_target
from tests.attention.test_gpu_paged import Shape, abstract_call

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs tbo-jax[cuda12]"
)

# The chip that is described, what differs, and bytes of shared memory of a block where less.
SMALL = 101376
CAPABILITIES: dict[str, tuple[str, dict[str, int], int | None]] = {
    "8.0": ("a100x1", {}, None),
    "8.6": ("a100x1", {"minor": 6}, SMALL),
    "8.9": ("a100x1", {"minor": 9}, SMALL),
    "9.0": ("h100x1", {}, None),
    "10.0": ("b200x1", {}, None),
    "12.0": ("b200x1", {"major": 12, "minor": 0}, SMALL),
}


def target(capability: str) -> Target:
    name, changes, memory = CAPABILITIES[capability]
    found = find_target(name)
    device: dict[str, Any] = dict(found.description["gpu_device_info"])
    device["cuda_compute_capability"] = device["cuda_compute_capability"] | changes
    if memory is not None:
        device["shared_memory_per_block_optin"] = memory
    description = {**found.description, "gpu_device_info": device}
    return dataclasses.replace(found, name=f"sm {capability}", description=description)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(16, 2, 64, None), (16, 2, 128, None), (16, 2, 256, None), (128, 1, 576, 512)],
)
def test_fits(
    capability: str, dtype: Any, heads: int, kv_heads: int, head_dim: int, value_dim: int | None
) -> None:
    shape = Shape(
        heads, kv_heads, head_dim, dtype, tokens=64, rows=4, page_size=16, pages_per_row=64,
        value_dim=value_dim,
    )  # fmt: skip
    mesh = target(capability).mesh()
    if GpuAttention.unsupported(shape.attention, mesh.devices.flat[0]):
        assert value_dim is not None and CAPABILITIES[capability][2] is not None
        return
    whole = NamedSharding(mesh, PartitionSpec())
    for query_block in {1, 4, GpuAttention(shape.attention).query_block}:
        call, arguments = abstract_call(shape, query_block)
        placed = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=whole), arguments
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Triton backend is deprecated", DeprecationWarning)
            jax.jit(call).lower(*placed).compile({"xla_gpu_autotune_level": "0"})

"""Attention kernels compiled for every kind of GPU: they fit its shared memory and registers.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU. Run with jax 0.10.2: all pass.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tbo_jax.attention.gpu_paged import GpuAttention
from tests.attention.test_gpu_paged import Shape, abstract_call
from tests.gpu_code import CAPABILITIES, WRITES_PTX, compiled, lower, needs_compiler, target

pytestmark = needs_compiler

SPILLED = 8  # bytes of a thread, at most


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
    device = target(capability).mesh().devices.flat[0]
    if GpuAttention.unsupported(shape.attention, device):
        assert value_dim is not None and CAPABILITIES[capability][2] is not None
        return
    for query_block in {1, 4, GpuAttention(shape.attention).query_block}:
        _, kernels = compiled(lower(*abstract_call(shape, query_block), capability))
        attention = [kernel for name, kernel in kernels.items() if "attention" in name]
        assert attention or not WRITES_PTX
        for kernel in attention:
            assert kernel.spilled <= SPILLED
            assert dtype != jnp.float32 or "tf32" not in kernel.ptx

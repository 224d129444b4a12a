"""Expert kernels compiled for every kind of GPU: they fit its shared memory and registers.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU. Run with jax 0.10.2: all pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.gpu_experts import GpuExperts
from tests.gpu_code import CAPABILITIES, WRITES_PTX, compiled, lower, needs_compiler, target
from tests.moe.stacks import CLAMPED, between_others
from tests.moe.test_gpu_experts import Shape

pytestmark = needs_compiler

SPILLED = 8  # bytes of a thread, at most


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [16, 64, 128])  # of an expert
@pytest.mark.parametrize("biased", [False, True])
def test_fits(capability: str, dtype: Any, rows: int, biased: bool) -> None:
    shape = Shape(rows * 8, 1, 8, hidden=256, width=256, dtype=dtype, biased=biased)
    kernel = GpuExperts.for_device(shape.of_experts, target(capability).mesh().devices.flat[0])
    activation = CLAMPED if biased else SwiGlu()

    def apply(rows, ids, weights, *arrays):
        return kernel(rows, ids, weights, between_others(*arrays, activation=activation))

    of_rows, weights, *arrays = (
        jax.ShapeDtypeStruct(axes, shape.dtype) for axes in shape.operands()
    )
    ids = jax.ShapeDtypeStruct((shape.rows, shape.top_k), jnp.int32)
    _, kernels = compiled(lower(apply, (of_rows, ids, weights, *arrays), capability))
    ours = [kernel for name, kernel in kernels.items() if name.startswith("tbo_experts")]
    assert len(ours) == 3 or not WRITES_PTX
    for kernel_code in ours:
        assert kernel_code.spilled <= SPILLED
        assert dtype != jnp.float32 or "tf32" not in kernel_code.ptx

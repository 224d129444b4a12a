"""Kernels of training compiled for every kind of GPU: they fit its shared memory and registers.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tbo_jax.attention.gpu_flash import GpuFlashAttention
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.gpu_experts_grad import DifferentiableGpuExperts
from tests.gpu_code import CAPABILITIES, WRITES_PTX, compiled, lower, needs_compiler, target
from tests.moe.stacks import CLAMPED
from tests.moe.test_gpu_experts import Shape

pytestmark = [needs_compiler, pytest.mark.slow]

SPILLED = 16  # bytes of a thread, at most


def check(gradient: Any, arguments: Any, capability: str, prefix: str, count: int) -> None:
    _, kernels = compiled(lower(gradient, arguments, capability))
    ours = {name: kernel for name, kernel in kernels.items() if name.startswith(prefix)}
    assert len(ours) >= count or not WRITES_PTX
    for name, kernel in ours.items():
        if arguments[0].dtype != jnp.float32:  # which sums in registers, at full precision
            assert kernel.spilled <= SPILLED, (name, kernel.registers, kernel.spilled)
        assert arguments[0].dtype != jnp.float32 or "tf32" not in kernel.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "head"), [(jnp.bfloat16, 128), (jnp.bfloat16, 256), (jnp.float32, 128)]
)
def test_attention_fits(capability: str, dtype: Any, head: int) -> None:
    kernel = GpuFlashAttention(AttentionShape(8, 2, head, dtype))

    def gradient(q, k, v):
        def loss(q, k, v):
            return kernel(q, k, v, length=256, scale=0.1).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    arguments = [jax.ShapeDtypeStruct((512, heads, head), dtype) for heads in (8, 2, 2)]
    check(gradient, arguments, capability, "tbo_flash", 3)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_fit(capability: str, dtype: Any, biased: bool) -> None:
    shape = Shape(1024, 1, 8, hidden=256, width=256, dtype=dtype, biased=biased)
    kernel = DifferentiableGpuExperts.for_device(
        shape.of_experts, target(capability).mesh().devices.flat[0]
    )
    activation = CLAMPED if biased else SwiGlu()

    def gradient(rows, ids, weights, *arrays):
        def loss(rows, weights, *arrays):
            matrices = ExpertWeights(*arrays, activation=activation)
            return kernel(rows, ids, weights, matrices).astype(jnp.float32).sum()

        return jax.grad(loss, tuple(range(2 + len(arrays))))(rows, weights, *arrays)

    of_rows, weights, *arrays = (
        jax.ShapeDtypeStruct(axes, shape.dtype) for axes in shape.operands()
    )
    ids = jax.ShapeDtypeStruct((shape.rows, shape.top_k), jnp.int32)
    check(gradient, (of_rows, ids, weights, *arrays), capability, "tbo_experts", 5)

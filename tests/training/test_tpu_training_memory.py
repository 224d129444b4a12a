"""Kernels of training compiled for TPUs: they fit, and write no scores and no weights.

Needs the compiler of `tbo-jax[tpu]`, and no TPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tbo_jax.attention import tpu_flash
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.tpu_flash import TpuFlashAttention
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.tpu_experts_grad import DifferentiableTpuExperts
from tests.moe.test_gpu_experts import Shape
from tests.tpu_compiler import compiled_for_tpu, needs_tpu_compiler, prepare_libtpu

pytestmark = [needs_tpu_compiler, pytest.mark.slow]
TARGETS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("head", "value"), [(128, 128), (64, 64), (192, 128), (576, 512)])
def test_attention(target: str, head: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_libtpu(monkeypatch)
    heads, tokens = 8, 4096
    kernel = TpuFlashAttention(AttentionShape(heads, 2, head, jnp.bfloat16, value))
    arguments = [
        jax.ShapeDtypeStruct((tokens, count, size), jnp.bfloat16)
        for count, size in ((heads, head), (2, head), (2, value))
    ]

    def gradient(q, k, v):
        def loss(q, k, v):
            return kernel(q, k, v, length=2048, scale=0.1).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    compiled = compiled_for_tpu(gradient, arguments, target)
    text = compiled.as_text()
    for name in (tpu_flash.FORWARD, tpu_flash.QUERIES_GRAD, tpu_flash.KEYS_GRAD):
        assert name in text  # the names that the report knows
    scores = 4 * tokens * heads * 2048
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.parametrize("target", TARGETS)
def test_experts(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes of Qwen3-30B-A3B on 8 devices, and 1,024 tokens of each."""
    prepare_libtpu(monkeypatch)
    shape = Shape(8192, 8, 16, hidden=2048, width=768, dtype=jnp.bfloat16)
    kernel = DifferentiableTpuExperts(shape.of_experts)
    rows, weights, *arrays = (jax.ShapeDtypeStruct(axes, jnp.bfloat16) for axes in shape.operands())
    ids = jax.ShapeDtypeStruct(weights.shape, jnp.int32)

    def gradient(rows, ids, weights, *arrays):
        def loss(rows, weights, *arrays):
            return kernel(rows, ids, weights, ExpertWeights(*arrays)).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2, 3))(rows, weights, *arrays)

    compiled = compiled_for_tpu(gradient, [rows, ids, weights, *arrays], target)
    sums = 2 * sum(2 * a.size for a in arrays)  # float32, for one more turn of the loop
    chunk = 1.25 * 8192 * (3 * 2048 + 6 * 768) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * sums + chunk

"""Attention of whole sequences on GPU, interpreted on CPU: result and gradient of the dense one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.attention import gpu_flash
from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.gpu_flash import GpuFlashAttention
from tbo_jax.attention.kernel import AttentionShape
from tests.gpu_lowering import lower_for_gpu

# sequences, length, heads, kv_heads, head, value, window, sinks
CASES = {
    "grouped": (2, 70, 4, 2, 32, 32, None, False),
    "window and sinks": (2, 70, 4, 2, 32, 32, 20, True),
    "odd sizes": (3, 5, 3, 1, 48, 16, 2, True),
    "keys of latents": (1, 40, 2, 2, 192, 128, None, False),
}


def operands(case: str) -> tuple[list[np.ndarray], np.ndarray]:
    sequences, length, heads, kv_heads, head, value, _, sinks = CASES[case]
    random, tokens = np.random.default_rng(0), sequences * length
    shapes = [(tokens, heads, head), (tokens, kv_heads, head), (tokens, kv_heads, value)]
    shapes += [(heads,)] if sinks else []
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    return arrays, random.normal(size=(tokens, heads, value)).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_are_those_of_the_dense_attention(case: str) -> None:
    _, length, heads, kv_heads, head, value, window, _ = CASES[case]
    arrays, grad = operands(case)
    kernel = GpuFlashAttention(
        AttentionShape(heads, kv_heads, head, np.float32, value), interpret=True
    )

    def of(attend):
        def apply(queries, keys, values, sinks=None):
            return attend(
                queries, keys, values, length=length, scale=0.3, sliding_window=window, sinks=sinks
            )

        def both(*arrays):
            out, transpose = jax.vjp(apply, *arrays)
            return out, *transpose(grad)

        with jax.default_matmul_precision("highest"):
            return jax.jit(both)(*arrays)

    names = "result", "queries", "keys", "values", "sinks"
    for what, got, want in zip(names, of(kernel), of(dense_causal_attention), strict=False):
        largest = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * largest, err_msg=what)


@pytest.mark.parametrize(("dtype", "head"), [("bfloat16", 128), ("float32", 64), ("bfloat16", 192)])
def test_it_lowers_for_gpus(dtype: str, head: int) -> None:
    kernel = GpuFlashAttention(AttentionShape(8, 2, head, jnp.dtype(dtype), sinks=True))
    shapes = (512, 8, head), (512, 2, head), (512, 2, head), (8,)

    def gradient(q, k, v, sinks):
        def loss(q, k, v, sinks):
            out = kernel(q, k, v, length=256, scale=0.1, sliding_window=100, sinks=sinks)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, sinks)

    text = lower_for_gpu(gradient, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])
    for name in (gpu_flash.FORWARD, gpu_flash.QUERIES_GRAD, gpu_flash.KEYS_GRAD):
        assert name in text


def test_shapes_that_it_does_not_take() -> None:
    assert GpuFlashAttention.unsupported(AttentionShape(8, 2, 128, jnp.bfloat16)) is None
    latent = AttentionShape(8, 1, 576, jnp.bfloat16, value_dim=512)
    assert "576 is more than 256" in str(GpuFlashAttention.unsupported(latent))
    assert "24 is no multiple" in str(
        GpuFlashAttention.unsupported(AttentionShape(8, 2, 24, jnp.bfloat16))
    )

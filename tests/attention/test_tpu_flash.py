"""Attention of whole sequences on TPU, interpreted on CPU: result and gradient of the dense one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.tpu_flash import TpuFlashAttention

# sequences, length, heads, kv_heads, head, value, window, sinks
CASES = {
    "grouped": (2, 70, 4, 2, 32, 32, None, False),
    "window, sinks and two blocks": (2, 600, 4, 2, 32, 32, 70, True),
    "odd sizes": (3, 5, 3, 1, 48, 16, 2, True),
    "keys of latents": (1, 40, 2, 2, 192, 128, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_are_those_of_the_dense_attention(case: str) -> None:
    sequences, length, heads, kv_heads, head, value, window, sinks = CASES[case]
    random, tokens = np.random.default_rng(0), sequences * length
    shapes = [(tokens, heads, head), (tokens, kv_heads, head), (tokens, kv_heads, value)]
    shapes += [(heads,)] if sinks else []
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    grad = random.normal(size=(tokens, heads, value)).astype(np.float32)
    kernel = TpuFlashAttention(
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


def test_float32_is_refused_where_it_would_be_rounded() -> None:
    assert TpuFlashAttention.unsupported(AttentionShape(8, 2, 128, jnp.bfloat16)) is None
    reason = TpuFlashAttention.unsupported(AttentionShape(8, 2, 128, jnp.float32))
    assert reason == "float32 would be rounded to bfloat16 by the matrix units"

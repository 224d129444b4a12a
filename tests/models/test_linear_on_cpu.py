"""The forms that products have on CPU give what the plain product gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.layers.linear import FEW_ROWS, project
from tbo_jax.quantized.array import times


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, FEW_ROWS, FEW_ROWS + 1])
def test_a_product_of_any_rows(rows: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 40)), dtype)
    weight = jnp.asarray(rng.normal(size=(24, 40)), dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    rounding = 2 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    found = jax.jit(project)(x, weight)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=rounding, rtol=0)
    in_float32 = jax.jit(times)(x, weight.T)
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32, expected, atol=1e-4, rtol=0)


def test_one_row_is_no_loop_over_bfloat16() -> None:
    """XLA:CPU computes a single row of it in a loop of its own, 15 times as slow as two rows."""
    x, weight = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)
    text = jax.jit(project).lower(x, weight).as_text()
    assert "tensor<2x64xbf16>" in text and "tensor<2x32xf32>" in text

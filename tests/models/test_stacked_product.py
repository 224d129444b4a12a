"""Products with one matrix of a stack: the kernel that reads it in place, and who uses it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.layers import stacked_product
from tbo_jax.layers.linear import project, project_with_one
from tbo_jax.layers.stacked_product import StackedMatrix, plain, product, takes
from tbo_jax.quantized import gpu_product
from tests.gpu_lowering import lower_for_gpu


def numbers(rows: int, columns: int, inputs: int, layers: int) -> tuple[jax.Array, jax.Array]:
    x, stack = jax.random.split(jax.random.key(rows + columns))
    scale = inputs**-0.5
    return (
        jax.random.normal(x, (rows, inputs), jnp.bfloat16),
        jax.random.normal(stack, (layers, columns, inputs), jnp.bfloat16) * scale,
    )


@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "layers"),
    [(1, 64, 64, 1), (5, 64, 192, 3), (33, 192, 256, 2), (130, 64, 128, 2)],
)
def test_the_kernel_multiplies_by_the_matrix_of_the_layer(
    rows: int, columns: int, inputs: int, layers: int
) -> None:
    x, stack = numbers(rows, columns, inputs, layers)
    assert takes(rows, x.dtype, stack)
    for layer in range(layers):
        weight = StackedMatrix(stack, jnp.int32(layer))
        expected = np.asarray(x, np.float32) @ np.asarray(stack[layer], np.float32).T
        got = np.asarray(product(x, weight, True), np.float32)
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-9)


def test_other_layers_do_not_count() -> None:
    x, stack = numbers(3, 64, 128, 3)
    stack = stack.at[0].set(jnp.nan).at[2].set(jnp.nan)
    assert jnp.isfinite(product(x, StackedMatrix(stack, jnp.int32(1)), True)).all()


def test_its_gradients_are_those_of_the_plain_product() -> None:
    x, stack = numbers(5, 64, 128, 3)
    layer = jnp.int32(1)

    def loss(of, x, stack):
        return of(x, StackedMatrix(stack, layer)).astype(jnp.float32).sum()

    got = jax.grad(lambda *a: loss(lambda x, w: product(x, w, True), *a), (0, 1))(x, stack)
    expected = jax.grad(lambda *a: loss(plain, *a), (0, 1))(x, stack)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    ("rows", "shape", "dtype"),
    [
        (stacked_product.MOST_ROWS + 1, (2, 64, 64), jnp.bfloat16),
        (8, (2, 96, 64), jnp.bfloat16),
        (8, (2, 64, 96), jnp.bfloat16),
        (8, (2, 64, 64), jnp.float32),
    ],
)
def test_what_the_kernel_does_not_take_is_sliced(rows: int, shape: tuple[int, ...], dtype) -> None:
    stack = jnp.ones(shape, dtype)
    assert not takes(rows, dtype, stack)
    given = (jnp.ones((rows, shape[2]), dtype), stack, jnp.int32(1))
    text = lower_for_gpu(lambda x, s, i: project_with_one(x, StackedMatrix(s, i)), given)
    assert stacked_product.NAME not in text
    assert "dynamic_slice" in text


@pytest.mark.parametrize("why", ["the backend is gone", "other kernels are asked for"])
def test_without_its_backend_the_matrix_is_sliced(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, stack = numbers(8, 64, 64, 2)
    if why == "the backend is gone":
        monkeypatch.setattr(gpu_product, "plgpu", None)
    with gpu_product.enabled(why == "the backend is gone"):
        assert not takes(8, x.dtype, stack)
        got = project_with_one(x, StackedMatrix(stack, jnp.int32(1)))
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(project(x, stack[1]), np.float32)
    )


def test_on_gpu_nothing_is_sliced_and_elsewhere_the_slice_is_projected_with() -> None:
    x, stack = numbers(8, 64, 64, 2)
    of = jax.jit(lambda x, s, i: project_with_one(x, StackedMatrix(s, i)))
    given = (x, stack, jnp.int32(1))
    text = lower_for_gpu(of, given)
    assert stacked_product.NAME in text
    assert "dynamic_slice" not in text
    np.testing.assert_array_equal(
        np.asarray(of(*given), np.float32), np.asarray(project(x, stack[1]), np.float32)
    )

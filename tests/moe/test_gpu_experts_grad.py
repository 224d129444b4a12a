"""The gradient of the GPU kernels for experts, interpreted on CPU, against autodiff of a dense sum."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.gpu_experts_grad import DifferentiableGpuExperts
from tbo_jax.moe.kernel import ExpertShape
from tests.gpu_lowering import lower_for_gpu
from tests.moe.stacks import CLAMPED
from tests.moe.test_gpu_experts import Shape

SHAPES = {
    "more experts than rows": Shape(5, 3, 8),
    "biased, narrow blocks": Shape(40, 2, 4, hidden=192, width=64, biased=True),
    "large tiles": Shape(150, 2, 2),
}


def dense(rows: Any, ids: Any, weights: Any, *arrays: Any, activation: SwiGlu) -> Any:
    """Every row through every expert, and what was chosen of it."""
    gate_up, down, *biases = arrays
    of_gate_up, of_down = biases or (jnp.zeros(gate_up.shape[::2]), jnp.zeros(down.shape[::2]))
    mine = ids[:, :, None] == jnp.arange(len(down))
    share = jnp.where(mine, weights[:, :, None], 0).sum(1)
    product = functools.partial(jnp.einsum, precision="highest")
    hidden = product("md,edf->mef", rows, gate_up) + of_gate_up
    out = product("mef,efd->med", activation(*jnp.split(hidden, 2, -1)), down) + of_down
    return product("med,me->md", out, share)


def operands(shape: Shape, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=axes).astype(np.float32) for axes in shape.operands()]
    return [arrays[0], arrays[1], *(a / np.sqrt(a.shape[-2]) for a in arrays[2:])]


def choices(shape: Shape, kind: str) -> np.ndarray:
    """[M, K], each row's experts: different ones, some of them of other devices."""
    random = np.random.default_rng(1)
    ids = np.argsort(random.random((shape.rows, 2 * shape.experts)), axis=1)[:, : shape.top_k]
    if kind == "one expert":
        ids[:] = shape.experts
        ids[:, 0] = 1
    if kind == "nobody":
        ids[:] = -1
    return ids.astype(np.int32)


@functools.cache
def transposes(shape: Shape) -> Any:
    """The jitted gradients of kernel and reference."""
    activation = CLAMPED if shape.biased else SwiGlu()
    kernel = DifferentiableGpuExperts(shape.of_experts, interpret=True)

    def ours(grad, ids, rows, weights, *arrays):
        def apply(rows, weights, *arrays):
            return kernel(rows, ids, weights, ExpertWeights(*arrays, activation=activation))

        return jax.vjp(apply, rows, weights, *arrays)[1](grad)

    def reference(grad, ids, rows, weights, *arrays):
        def apply(rows, weights, *arrays):
            return dense(rows, ids, weights, *arrays, activation=activation)

        return jax.vjp(apply, rows, weights, *arrays)[1](grad)

    return jax.jit(ours), jax.jit(reference)


@pytest.mark.parametrize("kind", ["random", "one expert", "nobody"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_dense_sum(name: str, kind: str) -> None:
    shape = SHAPES[name]
    rows, weights, *arrays = operands(shape)
    ids = choices(shape, kind)
    grad = np.random.default_rng(2).normal(size=rows.shape).astype(np.float32)
    ours, reference = transposes(shape)
    want = reference(grad, ids, rows, weights, *arrays)
    # What no expert here was chosen for is padding, and may be anything.
    nobodys = ~((ids >= 0) & (ids < shape.experts)).any(1)
    # In arrays of their own: the reference may still read the others.
    rows, grad = (np.where(nobodys[:, None], np.float32(np.nan), array) for array in (rows, grad))
    names = "rows", "weights", "gate_up", "down", "gate_up_bias", "down_bias"
    for what, got, expected in zip(
        names, ours(grad, ids, rows, weights, *arrays), want, strict=False
    ):
        largest = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * largest, err_msg=what)


def test_gradient_of_a_stack_is_that_of_its_layer() -> None:
    shape = Shape(20, 2, 2)
    rows, weights, *arrays = operands(shape)
    ids = choices(shape, "random")
    kernel = DifferentiableGpuExperts(shape.of_experts, interpret=True)

    def of_stack(*stacks):
        return kernel(rows, ids, weights, ExpertWeights(*stacks).of_layer(jnp.int32(1))).sum()

    stacks = [np.stack([np.full_like(a, np.nan), a]) for a in arrays]
    got = jax.jit(jax.grad(of_stack, (0, 1)))(*stacks)
    want = transposes(shape)[1](np.ones_like(rows), ids, rows, weights, *arrays)[2:]
    for of_stack_, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(of_stack_[1], expected, rtol=0, atol=1e-4)
        assert not np.asarray(of_stack_[0]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_lowers_for_gpus(dtype: str) -> None:
    kernel = DifferentiableGpuExperts(ExpertShape(2048, 768, jnp.dtype(dtype)))
    shape = Shape(4096, 8, 16, hidden=2048, width=768)
    rows, weights, *arrays = (jax.ShapeDtypeStruct(axes, dtype) for axes in shape.operands())
    ids = jax.ShapeDtypeStruct(weights.shape, jnp.int32)

    def gradient(rows, ids, weights, *arrays):
        def apply(rows, weights, *arrays):
            return kernel(rows, ids, weights, ExpertWeights(*arrays)).astype(jnp.float32).sum()

        return jax.grad(apply, (0, 1, 2, 3))(rows, weights, *arrays)

    text = lower_for_gpu(gradient, (rows, ids, weights, *arrays))
    for name in kernel_names():
        assert name in text


def kernel_names() -> set[str]:
    from tbo_jax.moe import gpu_experts_grad as module

    return {
        module.HIDDEN_GRAD, module.ROWS_GRAD, module.GATE_UP_GRAD, module.DOWN_GRAD, module.SUM
    }  # fmt: skip

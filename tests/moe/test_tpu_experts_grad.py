"""The gradient of the TPU kernels for experts, interpreted on CPU, against that of a dense sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.moe import tpu_experts
from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.tpu_experts_grad import DifferentiableTpuExperts
from tests.moe.stacks import CLAMPED
from tests.moe.test_gpu_experts import Shape
from tests.moe.test_gpu_experts_grad import choices, dense, operands

SHAPES = {
    "more experts than rows": Shape(5, 3, 8, hidden=128, width=128),
    "biased, two tiles of rows": Shape(150, 2, 4, hidden=256, width=128, biased=True),
}
CASES = [
    ("more experts than rows", "random"),
    ("biased, two tiles of rows", "random"),
    ("biased, two tiles of rows", "one expert"),
    ("biased, two tiles of rows", "nobody"),
]


@pytest.mark.parametrize("chunk", [tpu_experts.CHUNK, 0.1])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_are_those_of_the_dense_sum(
    name: str, kind: str, chunk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_experts, "CHUNK", chunk)  # of 0.1: several turns
    shape = SHAPES[name]
    rows, weights, *arrays = operands(shape)
    ids = choices(shape, kind)
    grad = np.random.default_rng(2).normal(size=rows.shape).astype(np.float32)
    activation = CLAMPED if shape.biased else SwiGlu()
    kernel = DifferentiableTpuExperts(shape.of_experts, interpret=True)

    def ours(rows, weights, *arrays):
        return kernel(rows, ids, weights, ExpertWeights(*arrays, activation=activation))

    def reference(rows, weights, *arrays):
        return dense(rows, ids, weights, *arrays, activation=activation)

    def gradients(apply, grad, *operands):
        with jax.default_matmul_precision("highest"):
            return jax.jit(lambda grad, *x: jax.vjp(apply, *x)[1](grad))(grad, *operands)

    want = gradients(reference, grad, rows, weights, *arrays)
    # What no expert here was chosen for is padding, and may be anything.
    nobodys = ~((ids >= 0) & (ids < shape.experts)).any(1)
    rows, grad = (np.where(nobodys[:, None], np.float32(np.nan), array) for array in (rows, grad))
    names = "rows", "weights", "gate_up", "down", "gate_up_bias", "down_bias"
    got = gradients(ours, grad, rows, weights, *arrays)
    for what, one, expected in zip(names, got, want, strict=False):
        largest = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5 * largest, err_msg=what)


def test_gradient_of_a_stack_is_that_of_its_layer() -> None:
    shape = SHAPES["more experts than rows"]
    rows, weights, *arrays = operands(shape)
    ids = choices(shape, "random")
    kernel = DifferentiableTpuExperts(shape.of_experts, interpret=True)

    def of_stack(*stacks):
        return kernel(rows, ids, weights, ExpertWeights(*stacks).of_layer(jnp.int32(1))).sum()

    def of_layer(*arrays):
        return dense(rows, ids, weights, *arrays, activation=SwiGlu()).sum()

    stacks = [np.stack([np.full_like(a, np.nan), a]) for a in arrays]
    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.grad(of_stack, (0, 1)))(*stacks)
        want = jax.jit(jax.grad(of_layer, (0, 1)))(*arrays)
    for of_stack_, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(of_stack_[1], expected, rtol=0, atol=1e-4)
        assert not np.asarray(of_stack_[0]).any()

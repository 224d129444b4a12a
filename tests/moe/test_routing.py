from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.moe.routing import attach_loss, load_balancing_loss, top_k_softmax

LOGITS = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)


@pytest.mark.parametrize("renormalize", [False, True])
def test_top_k_softmax(renormalize: bool) -> None:
    exp = np.exp(LOGITS)
    probabilities = exp / exp.sum(-1, keepdims=True)
    expected_ids = np.argsort(-LOGITS, axis=-1)[:, :3]
    expected = np.take_along_axis(probabilities, expected_ids, axis=-1)
    if renormalize:
        expected /= expected.sum(-1, keepdims=True)
    weights, ids = top_k_softmax(jnp.asarray(LOGITS), 3, renormalize)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_softmax_of_bfloat16_logits_is_in_float32() -> None:
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    weights, ids = top_k_softmax(logits, 2, True)
    exact, exact_ids = top_k_softmax(logits.astype(jnp.float32), 2, True)
    assert weights.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ids, exact_ids)
    np.testing.assert_array_equal(weights, exact.astype(jnp.bfloat16))


def test_large_logits_give_finite_weights() -> None:
    weights, ids = top_k_softmax(jnp.array([[0.0, -1e4, 1e4]]), 2, True)
    assert weights.tolist() == [[1.0, 0.0]]
    assert int(ids[0, 0]) == 2


def test_balanced_routing_has_a_loss_of_one() -> None:
    experts = jnp.array([[0, 1], [2, 3], [1, 0], [3, 2]])
    assert float(load_balancing_loss(jnp.zeros((4, 4)), experts)) == pytest.approx(1)


def test_collapsed_routing_has_a_loss_of_the_number_of_experts() -> None:
    logits = jnp.tile(jnp.array([[50.0, 0, 0, 0]]), (6, 1))
    assert float(load_balancing_loss(logits, jnp.zeros((6, 1), jnp.int32))) == pytest.approx(4)


def test_load_balancing_loss_is_share_times_probability() -> None:
    _, ids = top_k_softmax(jnp.asarray(LOGITS), 2, True)
    exp = np.exp(LOGITS)
    probability = (exp / exp.sum(-1, keepdims=True)).mean(0)
    share = np.bincount(np.asarray(ids).ravel(), minlength=5) / ids.size
    expected = 5 * (probability * share).sum()
    assert float(load_balancing_loss(jnp.asarray(LOGITS), ids)) == pytest.approx(expected, rel=1e-5)


def test_gradient_of_the_balancing_loss_lowers_the_busy_expert() -> None:
    experts = jnp.zeros((7, 1), jnp.int32)
    grad = jax.grad(load_balancing_loss)(jnp.asarray(LOGITS), experts)
    assert (np.asarray(grad)[:, 0] > 0).all()
    assert (np.asarray(grad)[:, 1:] < 0).all()


def test_attached_loss_changes_the_gradient_and_nothing_else() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(attach_loss(w**2, 0.5 * jnp.sum(jnp.sin(w))))

    w = jnp.array([0.3, -1.0, 2.0])
    value, grad = jax.jit(jax.value_and_grad(loss))(w)
    assert float(value) == pytest.approx(float(jnp.sum(w**2)))
    np.testing.assert_allclose(grad, 2 * w + 0.5 * jnp.cos(w), rtol=1e-6)


def test_attached_loss_keeps_the_dtype() -> None:
    x = jnp.array([1.5, -2.0], jnp.bfloat16)
    out = attach_loss(x, jnp.float32(3))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, x)

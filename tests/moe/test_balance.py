"""The routers' balancing loss: its values, its gradient, and that parts add up to the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.moe.balance import RouterLoad
from tbo_jax.moe.routing import Routing

LOGITS = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
SOFTMAX = Routing(2, renormalize=False)


def load_of(routing: Routing, logits: jax.Array, experts: jax.Array) -> RouterLoad:
    """Of a model of one layer."""
    whole = RouterLoad.zeros(1, logits.shape[-1])
    return whole.with_layer(0, whole.layer(0).add(routing.shares(logits), experts))


def balance_loss(routing: Routing, logits: jax.Array, experts: jax.Array) -> jax.Array:
    load = load_of(routing, logits, experts)
    return load.balance_loss(len(logits), load.choices)[0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balanced_routing_has_a_loss_of_one(score: str) -> None:
    experts = jnp.array([[0, 1], [2, 3], [1, 0], [3, 2]])
    loss = balance_loss(Routing(2, score), jnp.zeros((4, 4)), experts)
    assert float(loss) == pytest.approx(1)


def test_collapsed_routing_has_a_loss_of_the_number_of_experts() -> None:
    logits = jnp.tile(jnp.array([[50.0, 0, 0, 0]]), (6, 1))
    loss = balance_loss(SOFTMAX, logits, jnp.zeros((6, 1), jnp.int32))
    assert float(loss) == pytest.approx(4)


def test_loss_is_share_times_probability() -> None:
    _, ids = SOFTMAX.route(jnp.asarray(LOGITS))
    exp = np.exp(LOGITS)
    probability = (exp / exp.sum(-1, keepdims=True)).mean(0)
    share = np.bincount(np.asarray(ids).ravel(), minlength=5) / ids.size
    expected = 5 * (probability * share).sum()
    assert float(balance_loss(SOFTMAX, jnp.asarray(LOGITS), ids)) == pytest.approx(expected, 1e-5)


def test_gradient_lowers_the_busy_expert() -> None:
    experts = jnp.zeros((12, 1), jnp.int32)
    grad = jax.grad(lambda x: balance_loss(SOFTMAX, x, experts))(jnp.asarray(LOGITS))
    assert (np.asarray(grad)[:, 0] > 0).all()
    assert (np.asarray(grad)[:, 1:] < 0).all()


def test_parts_add_up_to_the_whole_with_their_gradients() -> None:
    logits = jnp.asarray(LOGITS)
    experts = SOFTMAX.route(logits)[1]
    choices = load_of(SOFTMAX, logits, experts).choices

    def of_parts(logits: jax.Array) -> jax.Array:
        parts = [
            load_of(SOFTMAX, logits[rows], experts[rows]).balance_loss(12, choices)[0]
            for rows in (slice(0, 3), slice(3, 12))
        ]
        return parts[0] + parts[1]

    whole = jax.value_and_grad(lambda x: balance_loss(SOFTMAX, x, experts))(logits)
    for part, expected in zip(jax.value_and_grad(of_parts)(logits), whole):
        np.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-8)
    halves = [balance_loss(SOFTMAX, logits[r], experts[r]) for r in (slice(0, 3), slice(3, 12))]
    assert abs(float((3 * halves[0] + 9 * halves[1]) / 12 - whole[0])) > 1e-3


def test_layers_without_experts_have_no_loss() -> None:
    load = RouterLoad.zeros(3, 5)
    np.testing.assert_array_equal(load.balance_loss(4, load.choices), 0)

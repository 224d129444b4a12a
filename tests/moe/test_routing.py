from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.moe.routing import Routing, top_k_softmax

SOFTMAX = Routing(2)
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


def route_one(routing: Routing, logits: np.ndarray, bias: np.ndarray) -> dict[int, float]:
    """One token, step by step, as the DeepSeek-V3 and ERNIE 4.5 reports describe it."""
    if routing.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum()
    size = len(logits) // routing.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(routing.num_groups)]
    wanted = scores + bias
    groups.sort(key=lambda group: -sum(sorted(wanted[group])[-2:]))
    allowed = [e for group in groups[: routing.groups_per_token] for e in group]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: routing.top_k]
    total = sum(scores[chosen]) if routing.renormalize else 1.0
    return {e: routing.scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, "softmax", smallest_sum=1e-12),
        Routing(3, "sigmoid"),
        Routing(3, "sigmoid", renormalize=False, scale=2.5),
        Routing(4, "sigmoid", scale=2.5, num_groups=4, groups_per_token=2),
        Routing(2, "softmax", renormalize=False, num_groups=3, groups_per_token=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_routing_against_its_description(routing: Routing, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(20, 12)).astype(np.float32)
    bias = 0.2 * rng.normal(size=12).astype(np.float32)
    weights, ids = routing.route(jnp.asarray(logits), jnp.asarray(bias))
    for token in range(20):
        expected = route_one(routing, logits[token], bias)
        assert ids[token].tolist() == list(expected)
        np.testing.assert_allclose(weights[token], list(expected.values()), rtol=1e-5)


def test_negative_scores_of_a_chosen_group_go_before_those_left_out() -> None:
    """With a strongly negative bias an expert outside must not win by being masked to zero."""
    routing = Routing(2, "sigmoid", num_groups=2, groups_per_token=1)
    _, ids = routing.route(jnp.array([[2.0, 1.0, 0.0, 0.0]]), jnp.array([-3.0, -3, -4, -4]))
    assert ids.tolist() == [[0, 1]]


def test_scores_that_vanish_give_finite_weights() -> None:
    weights, _ = Routing(2, "sigmoid").route(jnp.full((1, 4), -1e4))
    assert weights.tolist() == [[0.0, 0.0]]


def test_the_bias_has_no_gradient() -> None:
    def loss(bias: jax.Array) -> jax.Array:
        weights, _ = Routing(2, "sigmoid").route(jnp.asarray(LOGITS), bias)
        return jnp.sum(weights**2)

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(5)), 0)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(9), "9 experts a token, of only 8"),
        (Routing(2, num_groups=3), "8 experts do not divide into 3 groups"),
        (Routing(1, num_groups=8), "8 experts do not divide into 8 groups of two or more"),
        (Routing(2, num_groups=2, groups_per_token=3), "3 groups a token, of only 2"),
        (Routing(3, num_groups=4), "3 experts a token, of only 2 in 1 of 4 groups"),
    ],
)
def test_routing_that_cannot_be(routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        routing.check(8)

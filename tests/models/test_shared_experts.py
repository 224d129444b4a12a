"""Shared experts are computed from what stays on the device, not from what was received."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.checkpoint.load import load_model
from tbo_jax.layers.context import DenseAttention, LayerContext
from tbo_jax.layers.decoder import SparseLayer
from tbo_jax.layers.rotary import rotary_table
from tbo_jax.parallel.exchange import LocalExchange
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import DATA

TOKENS = 6


def layer_and_context(name):
    model = load_model(DATA / name, mesh=make_mesh(1), dtype=jnp.float32)
    layer = next(layer for layer in model.layers if isinstance(layer, SparseLayer))
    context = LayerContext(
        attention=DenseAttention(TOKENS),
        exchange=LocalExchange(),
        rotary=rotary_table(model.config.rotary, jnp.arange(TOKENS)),
        live=jnp.ones(TOKENS, bool),
    )
    return layer, context


def routed(layer, x, context):
    return layer.route(*layer.attend(x, None, None, context), context)


def inputs():
    return jax.random.normal(jax.random.key(0), (TOKENS, 48))


@pytest.mark.parametrize(
    "name", [pytest.param("qwen2_moe", marks=pytest.mark.slow), "ernie4_5_moe"]
)
def test_shared_experts_do_not_wait_for_the_dispatch(name):
    layer, context = layer_and_context(name)
    x = inputs()
    carry, (hidden, experts, weights), _ = routed(layer, x, context)

    @jax.jit
    def carry_after(received):
        return layer.run_experts(carry, received, None, context)[0][0]

    after = carry_after((hidden, experts, weights))
    np.testing.assert_array_equal(after, carry_after((hidden * jnp.nan, experts, weights)))
    np.testing.assert_allclose(after, carry[0] + layer.mlp.shared(carry[2]), rtol=1e-5, atol=1e-5)
    assert np.abs(after - carry[0]).max() > 0.01


def test_the_gate_of_qwen2_moe_scales_each_token():
    layer, _ = layer_and_context("qwen2_moe")
    mlp, x = layer.mlp, inputs()
    plain = mlp.shared_experts(x)
    gate = 1 / (1 + np.exp(-(x @ mlp.shared_expert_gate.weight[...].T)))
    assert gate.shape == (TOKENS, 1)
    np.testing.assert_allclose(mlp.shared(x), plain * gate, rtol=1e-5, atol=1e-6)


def test_layers_without_shared_experts_keep_no_normed_input():
    layer, context = layer_and_context("mixtral")
    carry, _, _ = routed(layer, jnp.ones((TOKENS, 64)), context)
    assert carry[-1] is None

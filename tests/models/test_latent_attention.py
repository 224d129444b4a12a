"""Latent attention in training: no cache, whole sequences, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tbo_jax.checkpoint.load import load_model
from tbo_jax.layers.context import DenseAttention, LayerContext
from tbo_jax.layers.rotary import rotary_table
from tbo_jax.overlap.stages import run_layers
from tbo_jax.parallel.exchange import LocalExchange
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import Golden


def logits_of(model, tokens):
    """Logits [T, V] of one sequence in one piece."""
    context = LayerContext(
        attention=DenseAttention(len(tokens)),
        exchange=LocalExchange(),
        rotary=rotary_table(model.config.rotary, jnp.arange(len(tokens))),
        live=jnp.ones(len(tokens), bool),
    )
    (hidden,), _ = run_layers(model.layers, [model.embed(jnp.asarray(tokens))], [context])
    return model.logits(hidden)


@pytest.mark.slow
def test_whole_sequences_give_the_golden_logits_and_gradients():
    golden = Golden("deepseek_v3")
    model = load_model(golden.folder, mesh=make_mesh(1), dtype=jnp.float32)
    tokens, expected = golden.tokens[-1], golden.logits[-1]

    def run(state):
        def loss(state):
            logits = logits_of(nnx.merge(graph, state), tokens)
            picked = jax.nn.log_softmax(logits[:-1])[jnp.arange(len(tokens) - 1), tokens[1:]]
            return -picked.mean(), logits

        return jax.grad(loss, has_aux=True)(state)

    graph, state = nnx.split(model)
    # The choice of experts has no gradient, nor have the biases that take part in it.
    compiled = jax.jit(run).lower(state).compile({"xla_backend_optimization_level": "0"})
    grads, logits = compiled(state)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    for path, grad in nnx.to_flat_state(grads):
        value = np.asarray(grad.get_value())
        assert np.isfinite(value).all(), path
        assert value.any() == ("correction_bias" not in path), path

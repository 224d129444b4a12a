"""Random weights for a model of any shape, where only the time of its steps counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.parallel.sharding import parameter_spec


def random_model(config: DecoderConfig, mesh: Mesh) -> CausalLM:
    """The model with normal numbers for weights, and ones for those of norms.

    Each device makes its own shard: no array is ever whole on the host or on one device.
    """

    @functools.cache
    def maker(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[..., Any]:
        def make(key: jax.Array) -> jax.Array:
            if len(shape) == 1:  # of a norm
                return jnp.ones(shape, dtype)
            return jax.random.normal(key, shape, dtype) * config.initializer_range

        return jax.jit(make, out_shardings=sharding)

    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0))))
    made = []
    for number, (path, variable) in enumerate(nnx.to_flat_state(state)):
        sharding = NamedSharding(mesh, parameter_spec(path, variable, mesh))
        value = maker(variable.shape, variable.dtype, sharding)(jax.random.key(number))
        made.append((path, variable.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(made))

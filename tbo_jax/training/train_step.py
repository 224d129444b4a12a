"""Training: the stages that decode, run forward and backward as one jitted step over all ranks.

    loss = NextTokenLoss(model, mesh=mesh, overlap=OverlapConfig.from_env(), balance_weight=0.01)
    state = init_train_state(model, optimizer, loss)
    step = make_train_step(loss, optimizer)
    state, metrics = step(state, tokens)  # tokens [B, S + 1]; `state` is donated

Sequences are sharded over the ranks and experts are, as in decoding; all else is on every rank.
An expert's gradient comes about where the expert is, the others are summed over the ranks. With
two micro-batches a rank's sequences are cut into two halves, and the communication of one is in
flight while the other computes, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.layers.decoder import CausalLM
from tbo_jax.training.loss import Metrics, NextTokenLoss


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step takes and returns."""

    weights: nnx.State
    optimizer_state: optax.OptState
    step: jax.Array  # [] int32: steps done


def init_train_state(
    model: CausalLM, optimizer: optax.GradientTransformation, loss: NextTokenLoss
) -> TrainState:
    """The state before the first step, on the devices of the loss's mesh.

    It may share memory with the model, whose arrays are then gone with the first step.

    Args:
        model: with its weights, which may be on one device or on those of the mesh already.
        optimizer: any of optax.
        loss: of `model`.
    """
    state = _first_state(nnx.state(model), optimizer)
    return jax.device_put(state, train_state_shardings(state, optimizer, loss))


def abstract_train_state(
    model: CausalLM, optimizer: optax.GradientTransformation, loss: NextTokenLoss
) -> TrainState:
    """The shapes, dtypes and shardings of `init_train_state`, of a model that may be abstract."""
    state = jax.eval_shape(partial(_first_state, optimizer=optimizer), nnx.state(model))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        train_state_shardings(state, optimizer, loss),
    )


def _first_state(weights: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(weights, optimizer.init(weights), jnp.zeros((), jnp.int32))


def train_state_shardings(
    state: TrainState, optimizer: optax.GradientTransformation, loss: NextTokenLoss
) -> TrainState:
    """Where each array of a state belongs: `NamedSharding`s in the structure of `state`.

    What an optimizer keeps for each weight goes where the weight is, the rest to every rank. The
    state may be abstract (`jax.eval_shape`).
    """
    whole: Any = NamedSharding(loss.mesh, PartitionSpec())
    weights = jax.tree.map(lambda spec: NamedSharding(loss.mesh, spec), loss.specs)
    kept = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.optimizer_state,
        weights,
        transform_non_params=lambda _: whole,
    )
    return TrainState(weights, kept, whole)


def make_train_step(
    loss: NextTokenLoss, optimizer: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """The jitted step `(state, tokens [B, S + 1] int32) -> (state, metrics)`.

    The state is donated and updated in place; use the returned one from here on. The optimizer sees
    whole arrays, so that a norm over all gradients is one over the experts of all ranks.
    """

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        metrics, gradient = loss.value_and_grad(state.weights, tokens)
        updates, kept = optimizer.update(gradient, state.optimizer_state, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        return TrainState(weights, kept, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=loss.compiler_options() or None)

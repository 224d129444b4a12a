"""Training with the stages that decode: loss, gradient and optax step over all ranks."""

from tbo_jax.training.loss import Metrics, NextTokenLoss
from tbo_jax.training.train_step import (
    TrainState,
    abstract_train_state,
    init_train_state,
    make_train_step,
    train_state_shardings,
)

__all__ = [
    "Metrics",
    "NextTokenLoss",
    "TrainState",
    "abstract_train_state",
    "init_train_state",
    "make_train_step",
    "train_state_shardings",
]

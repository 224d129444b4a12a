"""What the routers did with the tokens of a step, and the loss that keeps experts evenly busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterLoad:
    """Sums over tokens, so that those of micro-batches and of ranks add up.

    The balancing loss is a product of two means over tokens; the mean of the losses of two halves
    is not that of the whole. So layers only sum here, and the loss is made of the whole step's
    sums at the end. `run_layers` threads a load through the layers as their cache (`stages.Cache`).
    """

    sums: jax.Array  # [L, 2, E] float32, [2, E] of one layer: the tokens' scores, their choices

    @classmethod
    def zeros(cls, num_layers: int, num_experts: int) -> Self:
        """Of no tokens."""
        return cls(jnp.zeros((num_layers, 2, num_experts), jnp.float32))

    @property
    def choices(self) -> jax.Array:
        """[L, E]: how often each expert was chosen."""
        return self.sums[:, 1]

    def layer(self, index: Any, after: Any = None) -> RouterLoad:
        """That of one layer."""
        return RouterLoad(self.sums[index])

    def with_layer(self, index: Any, view: RouterLoad) -> RouterLoad:
        """With that of one layer replaced."""
        return RouterLoad(self.sums.at[index].set(view.sums))

    def add(self, scores: jax.Array, experts: jax.Array) -> RouterLoad:
        """One layer's, with tokens added: their scores [T, E] and chosen experts [T, K]."""
        chosen = jax.nn.one_hot(experts, scores.shape[-1], dtype=jnp.float32).sum((0, 1))
        return RouterLoad(self.sums + jnp.stack([scores.sum(0), chosen]))

    def balance_loss(self, tokens: int, choices: jax.Array) -> jax.Array:
        """Each layer's loss: 1 when all tokens are spread evenly, more when not, 0 without experts.

        Switch Transformer (Fedus et al. 2021), equation 4, with K choices a token, over all
        `tokens` of a step, as Qiu et al. 2025 ("Demons in the detail") advise.

        Args:
            tokens: of the whole step.
            choices: [L, E], the `choices` of the whole step. This load may be a part of it: the
                losses of all parts, each with the choices of the whole, add up to that of the
                whole, and so do their gradients, because choices have none.

        Returns:
            [L] float32.
        """
        share = choices / jnp.maximum(choices.sum(-1, keepdims=True), 1.0)
        return choices.shape[-1] * jnp.sum(self.sums[:, 0] / tokens * share, axis=-1)

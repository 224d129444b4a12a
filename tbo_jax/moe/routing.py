"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """How the logits of a router become K experts a token and their weights.

    A token's scores are the softmax or the sigmoid of its logits. The experts with the highest
    scores are chosen; their scores are the weights. What models add to that:

    - Mixtral, Qwen2-MoE and Qwen3-MoE: softmax, as it is or with `renormalize`.
    - ERNIE 4.5 (technical report, 2025): softmax, chosen with a correction bias, `renormalize`.
    - DeepSeek-V3 (technical report, 2024, section 2.1.2), Kimi-K2, GLM-4.5: sigmoid, chosen with a
      correction bias and within a limited number of groups, `renormalize`, `scale`.

    The correction bias (Wang et al. 2024, "Auxiliary-loss-free load balancing") takes part in the
    choice only, never in the weights.
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = True  # scale the chosen scores of a token to a sum of one
    smallest_sum: float = 1e-20  # by which `renormalize` divides
    scale: float = 1.0  # of the weights, after `renormalize`
    num_groups: int = 1  # neighbouring experts form a group
    groups_per_token: int = 1  # groups that a token's experts come from

    def check(self, num_experts: int) -> None:
        """Raise ValueError unless tokens can be routed so to `num_experts` experts."""
        groups, taken = self.num_groups, self.groups_per_token
        if num_experts % groups or (groups > 1 and num_experts // groups < 2):
            raise ValueError(
                f"{num_experts} experts do not divide into {groups} groups of two or more"
            )
        if taken > groups:
            raise ValueError(f"{taken} groups a token, of only {groups}")
        reached = num_experts // groups * taken
        if self.top_k > reached:
            where = f" in {taken} of {groups} groups" if groups > 1 else ""
            raise ValueError(f"{self.top_k} experts a token, of only {reached}{where}")

    def route(
        self, logits: jax.Array, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Choose.

        Args:
            logits: [T, E]; computed on in float32.
            bias: [E], added to the scores for the choice; None: nothing.

        Returns:
            weights [T, K] in the dtype of `logits`, expert ids [T, K] int32.
        """
        scores = self.scores(logits)
        if bias is None and self.num_groups == 1:
            weights, experts = jax.lax.top_k(scores, self.top_k)
        else:
            wanted = scores if bias is None else scores + bias.astype(jnp.float32)
            experts = jax.lax.top_k(self._within_groups(wanted), self.top_k)[1]
            weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.renormalize:
            weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), self.smallest_sum)
        if self.scale != 1.0:
            weights = weights * self.scale
        return weights.astype(logits.dtype), experts.astype(jnp.int32)

    def scores(self, logits: jax.Array) -> jax.Array:
        """[T, E] -> [T, E] float32, between 0 and 1."""
        logits = logits.astype(jnp.float32)
        return jax.nn.sigmoid(logits) if self.score == "sigmoid" else jax.nn.softmax(logits)

    def _within_groups(self, scores: jax.Array) -> jax.Array:
        """-inf for the experts of all groups but the best; a group is as good as its best two."""
        if self.groups_per_token == self.num_groups:
            return scores
        grouped = scores.reshape(scores.shape[0], self.num_groups, -1)
        of_group = jax.lax.top_k(grouped, 2)[0].sum(-1)
        best = jax.lax.top_k(of_group, self.groups_per_token)[1]
        taken = (best[:, :, None] == jnp.arange(self.num_groups)).any(1)  # [T, groups]
        return jnp.where(taken[:, :, None], grouped, -jnp.inf).reshape(scores.shape)

    def shares(self, logits: jax.Array) -> jax.Array:
        """[T, E] -> [T, E] float32: the scores with a sum of one a token, for the balancing loss.

        Softmax scores have it; sigmoid scores are scaled, as DeepSeek-V3 does (equation 19).
        """
        scores = self.scores(logits)
        return scores / scores.sum(-1, keepdims=True) if self.score == "sigmoid" else scores


def top_k_softmax(logits: jax.Array, top_k: int, renormalize: bool) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts, then the `top_k` largest; see `Routing.route`."""
    return Routing(top_k, renormalize=renormalize).route(logits)

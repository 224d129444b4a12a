"""Feed-forward blocks: the dense gated one, and the sparse mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.context import LayerContext
from tbo_jax.layers.linear import Linear
from tbo_jax.moe.routing import attach_loss, load_balancing_loss, top_k_softmax

EXPERT_AXIS = "experts"  # name by which expert weights say along which dimension they are sharded


class GatedMlp(nnx.Module):
    """Gated feed-forward block, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, config, bias=bias, rngs=rngs)
        self.up_proj = Linear(hidden, inner, config, bias=bias, rngs=rngs)
        self.down_proj = Linear(inner, hidden, config, bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nnx.Module):
    """Mixture of gated experts, in the three computes between which its tokens travel.

    The expert weights of the whole model have a leading axis of all E experts; in a step that runs
    over several devices each device sees its share of it.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.initializer_range)
        experts, hidden, width = (
            config.num_experts,
            config.hidden_size,
            config.expert_intermediate_size,
        )
        self.gate = Linear(hidden, experts, config, rngs=rngs)

        def weight(shape: tuple[int, ...]) -> nnx.Param:
            value = normal(rngs.params(), shape, config.dtype)
            return nnx.Param(value, sharded_over=EXPERT_AXIS)

        self.gate_up_proj = weight((experts, hidden, 2 * width))
        self.down_proj = weight((experts, width, hidden))
        self.top_k = config.num_experts_per_token
        self.renormalize = config.renormalize_experts

    def route(self, x: jax.Array, context: LayerContext) -> tuple[Any, Any]:
        """[T, D] -> the message to the experts' devices, and what `merge` needs to unpack."""
        logits = self.gate(x)
        weights, experts = top_k_softmax(logits, self.top_k, self.renormalize)
        if context.balance_loss_weight:
            loss = load_balancing_loss(logits, experts)
            weights = attach_loss(weights, context.balance_loss_weight * loss)
        experts = jnp.where(context.live[:, None], experts, -1)  # padding reaches no expert
        return context.exchange.pack(x, experts, weights)

    def apply(self, received: Any, context: LayerContext) -> Any:
        """What arrived -> the message back: this device's experts."""
        rows, experts, weights = context.exchange.unpack(received)
        out = context.experts(rows, experts, weights, self.gate_up_proj[...], self.down_proj[...])
        return context.exchange.pack_results(out)

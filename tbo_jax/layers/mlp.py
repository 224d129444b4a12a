"""Feed-forward blocks: the dense gated one, and the sparse mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.context import LayerContext
from tbo_jax.layers.linear import Linear, project, share_projections
from tbo_jax.layers.stored import Projection, StoredAs, StoredExperts
from tbo_jax.moe.balance import RouterLoad
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.overlap.stages import Chunks
from tbo_jax.parallel.sharding import Shard


class GatedMlp(nnx.Module):
    """Gated feed-forward block, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, inner: int, *, sharded: bool = False, rngs: nnx.Rngs):
        """`inner` features, with `sharded` shared out over the devices of a rank."""
        hidden, bias, units = config.hidden_size, config.mlp_bias, inner if sharded else 0

        def to_inner() -> Linear:
            return Linear(hidden, inner, config, bias=bias, sharded_outputs=units, rngs=rngs)

        self.gate_proj, self.up_proj = to_inner(), to_inner()
        self.down_proj = Linear(inner, hidden, config, bias=bias, sharded_inputs=units, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        return self.down_proj.add_bias(self.partial(x))

    def partial(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]: the sum over this device's features, without `down_proj`'s bias."""
        return self.down_proj.product(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nnx.Module):
    """A token's logits, one for each of E experts."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        dtype = jnp.float32 if config.float32_router else config.dtype
        init = nnx.initializers.normal(config.initializer_range)
        shape = (config.num_experts, config.hidden_size)
        self.weight = nnx.Param(init(rngs.params(), shape, dtype))
        zeros = jnp.zeros(config.num_experts)
        self.bias = nnx.Param(zeros.astype(dtype)) if config.router_bias else None
        stored = StoredAs("e_score_correction_bias")
        self.correction_bias = nnx.Param(zeros, stored=stored) if config.correction_bias else None
        self.in_float32 = config.float32_router

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, E]."""
        weight = self.weight[...]
        if not self.in_float32:
            logits = project(x, weight)
        else:  # HIGHEST: accelerators otherwise round the factors of a float32 product
            x = x.astype(jnp.float32)
            logits = jnp.einsum("td,ed->te", x, weight, precision=jax.lax.Precision.HIGHEST)
        return logits if self.bias is None else logits + self.bias[...]


class SparseMoe(nnx.Module):
    """Mixture of gated experts, in the three computes between which its tokens travel.

    The expert weights of the whole model have a leading axis of all E experts; in a step that runs
    over several devices each device sees its share of it. Shared experts, which every token goes
    to, are on each device and are one feed-forward block.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.initializer_range)
        experts, hidden, width = (
            config.num_experts,
            config.hidden_size,
            config.expert_intermediate_size,
        )
        self.gate = Router(config, rngs=rngs)

        shard = Shard("experts", 0, experts)

        def weight(shape: tuple[int, ...], *projections: Projection) -> nnx.Param:
            value = normal(rngs.params(), shape, config.dtype)
            return nnx.Param(value, shard=shard, stored=StoredExperts(projections), inputs=-2)

        def bias(shape: tuple[int, ...], *projections: Projection) -> nnx.Param | None:
            if not config.expert_bias:
                return None
            stored = StoredExperts(projections, bias=True)
            return nnx.Param(jnp.zeros(shape, config.dtype), shard=shard, stored=stored)

        self.gate_up_proj = weight((experts, hidden, 2 * width), "gate", "up")
        self.down_proj = weight((experts, width, hidden), "down")
        self.gate_up_bias = bias((experts, 2 * width), "gate", "up")
        self.down_bias = bias((experts, hidden), "down")
        self.activation = config.expert_activation
        self.layer: jax.Array | None = nnx.data(
            None
        )  # which one, where the weights are those of all layers
        assert config.router is not None
        self.router = config.router
        shared = config.shared_expert_intermediate_size
        gated = shared and config.shared_expert_gate
        self.shared_experts = GatedMlp(config, shared, rngs=rngs) if shared else None
        self.shared_expert_gate = Linear(hidden, 1, config, rngs=rngs) if gated else None

    def share_stack(self, stacked: SparseMoe, layer: Any) -> None:
        """Use the expert weights of all layers [L, E, ...], of which this is number `layer`."""
        self.gate_up_proj, self.down_proj = stacked.gate_up_proj, stacked.down_proj
        self.gate_up_bias, self.down_bias = stacked.gate_up_bias, stacked.down_bias
        self.layer = nnx.data(jnp.asarray(layer, jnp.int32))
        if self.shared_experts is not None and stacked.shared_experts is not None:
            share_projections(self.shared_experts, stacked.shared_experts, layer)

    def route(
        self, x: jax.Array, cache: Any, context: LayerContext, arrived: Any = None
    ) -> tuple[Any, Any, Any]:
        """A device's tokens [P, D] -> the message to the experts, what unpacks the answer, cache.

        What is told of the message waits for `arrived` (`Exchange.pack`).
        Training keeps a `RouterLoad` for a cache, to which the choices are added.
        """
        logits = self.gate(x)
        bias = self.gate.correction_bias
        weights, experts = self.router.route(logits, None if bias is None else bias[...])
        if isinstance(cache, RouterLoad):
            cache = cache.add(self.router.shares(logits), experts)
        live = context.tensor.part(context.live)
        experts = jnp.where(live[:, None], experts, -1)  # padding reaches no expert
        weights = weights.astype(x.dtype)
        message, places = context.exchange.pack(x, experts, weights, arrived)
        return Chunks(message) if context.exchange.chunks > 1 else message, places, cache

    def shared(self, x: jax.Array) -> jax.Array:
        """[P, D] -> [P, D]: the shared experts, on the device that has the tokens."""
        assert self.shared_experts is not None
        out = self.shared_experts(x)
        gate = self.shared_expert_gate
        return out if gate is None else jax.nn.sigmoid(gate(x)) * out

    def apply(
        self, received: Any, places: Any, kept: Any, context: LayerContext
    ) -> tuple[Any, Any]:
        """What arrived, and what unpacks the answer -> the message back: this device's experts.

        With an exchange in chunks, of one of them: `kept` is what the chunk before left, or None,
        and what the next one needs is given beside the message.
        """
        rows, experts, weights, kept = context.exchange.take_in(received, places, kept)
        out = context.experts(rows, experts, weights, self._matrices())
        return context.exchange.give_back(out, received, places, kept)

    def collect(self, returned: Any, places: Any, context: LayerContext) -> jax.Array:
        """What came back -> each token's sum over its experts, [P, D]."""
        messages = returned.messages if isinstance(returned, Chunks) else returned
        return context.exchange.unpack_results(messages, places)

    def _matrices(self) -> ExpertWeights:
        up_bias, down_bias = self.gate_up_bias, self.down_bias
        matrices = ExpertWeights(
            self.gate_up_proj[...],
            self.down_proj[...],
            None if up_bias is None else up_bias[...],
            None if down_bias is None else down_bias[...],
            self.activation,
        )
        return matrices if self.layer is None else matrices.of_layer(self.layer)

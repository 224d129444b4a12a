"""Decoder layers written as stages, and the causal language model around them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers.attention import SelfAttention
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.context import LayerContext
from tbo_jax.layers.latent_attention import LatentAttention
from tbo_jax.layers.linear import Linear, project, rms_norm, share_projections
from tbo_jax.layers.mlp import GatedMlp, SparseMoe
from tbo_jax.overlap.stages import StackedLayers, Stage


def dispatch(message, context: LayerContext):
    """Tokens to the devices of their experts."""
    return context.exchange.dispatch(message)


def combine(message, context: LayerContext):
    """The experts' sums back to the tokens' devices."""
    return context.exchange.combine(message)


def reduce(partial, context: LayerContext):
    """Partial sums of a rank's devices to their sum on each."""
    return context.tensor.reduce(partial)


def scatter(partial, context: LayerContext):
    """Partial sums of a rank's devices to each one's part of the tokens."""
    return context.tensor.scatter(partial)


def gather(part, context: LayerContext):
    """Each device's part of the tokens to all of them."""
    return context.tensor.gather(part, context.live.shape[0])


def make_attention(config: DecoderConfig, rngs: nnx.Rngs) -> SelfAttention | LatentAttention:
    """The attention that the configuration asks for."""
    if config.latent is None:
        return SelfAttention(config, rngs=rngs)
    return LatentAttention(config, config.latent, rngs=rngs)


class DenseLayer(nnx.Module):
    """Attention and gated feed-forward: (attend | reduce), (feed | reduce).

    Where a rank is one device nothing is added up, and both are one stage.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.self_attn = make_attention(config, rngs)
        self.post_attention_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.mlp = GatedMlp(config, config.intermediate_size, sharded=True, rngs=rngs)

    def share_stack(self, stacked: DenseLayer, index: Any) -> None:
        """Leave the projections of layer `index` in the stack: see `stacked_product`."""
        share_projections(self.self_attn, stacked.self_attn, index)
        share_projections(self.mlp, stacked.mlp, index)

    def attend(self, hidden, received, cache, context: LayerContext):
        """Residual stream [T, D] -> it, partial sums of the attention [T, D], and the cache."""
        attended, cache = self.self_attn(self.input_layernorm(hidden), cache, context)
        return self.self_attn.o_proj.add_bias(hidden), attended, cache

    def feed(self, hidden, attended, cache, context: LayerContext):
        """Residual stream and attention [T, D] -> their sum, partial sums of the MLP, the cache."""
        hidden = hidden + attended
        fed = self.mlp.partial(self.post_attention_layernorm(hidden))
        return self.mlp.down_proj.add_bias(hidden), fed, cache

    def attend_and_feed(self, hidden, received, cache, context: LayerContext):
        """The whole layer as one stage: `attend`, then `feed`."""
        hidden, attended, cache = self.attend(hidden, received, cache, context)
        return self.feed(hidden, attended, cache, context)

    def merge(self, hidden, fed, context: LayerContext):
        """Residual stream plus what the feed-forward gave, [T, D]."""
        return hidden + fed

    on_one_device = (Stage(attend_and_feed),)
    on_several = (Stage(attend, reduce), Stage(feed, reduce))

    def stages(self, context: LayerContext) -> tuple[Stage, ...]:
        """Those of a rank of one device, or of several."""
        return self.on_one_device if context.tensor.size == 1 else self.on_several


class SparseLayer(nnx.Module):
    """Attention and mixture of experts:

    (attend | scatter), (route | dispatch), (experts | combine), (collect | gather)

    and, where a rank is one device, (attend, route | dispatch), (experts | combine), with `collect`
    as a part of `merge`.

    Shared experts take their input from what stays on the device and not from what was received,
    so that nothing need arrive first. With one micro-batch XLA can compute them while the dispatch
    is in flight; with two, the pin puts them beside the other one's dispatch. Where the exchange
    has several chunks, `run_experts` runs once for each, and they belong to the first.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.self_attn = make_attention(config, rngs)
        self.post_attention_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.mlp = SparseMoe(config, rngs=rngs)

    def share_stack(self, stacked: SparseLayer, index: Any) -> None:
        """Leave the weights of layer `index` in the stack: see `ExpertWeights` for the experts'."""
        share_projections(self.self_attn, stacked.self_attn, index)
        self.mlp.share_stack(stacked.mlp, index)

    def attend(self, hidden, received, cache, context: LayerContext):
        """Residual stream [T, D] -> it, partial sums of the attention [T, D], and the cache."""
        attended, cache = self.self_attn(self.input_layernorm(hidden), cache, context)
        return self.self_attn.o_proj.add_bias(hidden), attended, cache

    def route(self, hidden, attended, cache, context: LayerContext, arrived=None):
        """Sum of residual stream and attention -> carry, message to the experts, and the cache."""
        hidden = context.tensor.part(hidden) + attended
        normed = self.post_attention_layernorm(hidden)
        message, places, cache = self.mlp.route(normed, cache, context, arrived)
        kept = None if self.mlp.shared_experts is None else normed
        return (hidden, places, kept, None), message, cache

    def run_experts(self, carry, received, cache, context: LayerContext):
        """Tokens received -> carry, the experts' results for them, and the cache."""
        hidden, places, normed, kept = carry
        if normed is not None:  # of the first chunk, if there are several
            hidden = hidden + self.mlp.shared(normed)
        results, kept = self.mlp.apply(received, places, kept, context)
        return (hidden, places, None, kept), results, cache

    def collect(self, carry, received, cache, context: LayerContext):
        """Results received -> residual stream plus each token's sum of them."""
        hidden, places, _, _ = carry
        return None, hidden + self.mlp.collect(received, places, context), cache

    def attend_and_route(self, hidden, received, cache, context: LayerContext, arrived=None):
        """Two stages in one: `attend`, then `route`."""
        hidden, attended, cache = self.attend(hidden, received, cache, context)
        return self.route(hidden, attended, cache, context, arrived)

    def merge(self, carry, received, context: LayerContext):
        """Residual stream [T, D] after the layer."""
        if context.tensor.size > 1:
            return received
        _, hidden, _ = self.collect(carry, received, None, context)
        return hidden

    on_one_device = (
        Stage(attend_and_route, dispatch, announces=True),
        Stage(run_experts, combine, chunked=True),
    )
    on_several = (
        Stage(attend, scatter),
        Stage(route, dispatch, announces=True),
        Stage(run_experts, combine, chunked=True),
        Stage(collect, gather),
    )

    def stages(self, context: LayerContext) -> tuple[Stage, ...]:
        """Those of a rank of one device, or of several."""
        return self.on_one_device if context.tensor.size == 1 else self.on_several


class CausalLM(nnx.Module):
    """Token embedding, decoder layers, final norm and the projection to the vocabulary."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, scanned: bool = False):
        """Make the model with random weights.

        Args:
            config: its shape.
            rngs: random streams of Flax.
            scanned: stack the layers for a scan instead of keeping one module per layer.

        Raises:
            ValueError: `scanned` and the layers are not all equal.
        """
        layers = [
            (SparseLayer if config.is_sparse(i) else DenseLayer)(config.of_layer(i), rngs=rngs)
            for i in range(config.num_layers)
        ]
        normal = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            param_dtype=config.dtype,
            embedding_init=normal,
            rngs=rngs,
        )
        self.layers = StackedLayers.stack(layers) if scanned else nnx.List(layers)
        self.norm = rms_norm(config.hidden_size, config, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, config, rngs=rngs)
        self.config = config

    def embed(self, token_ids: jax.Array, given: jax.Array | None = None) -> jax.Array:
        """[T] int32 -> [T, D]; image tokens have their embedding in `given` [T, D], if there is."""
        embedded = self.embed_tokens(token_ids)
        if given is None:
            return embedded
        assert self.config.image_token_id is not None
        is_image = jnp.equal(token_ids, self.config.image_token_id)
        return jnp.where(is_image[:, None], given.astype(embedded.dtype), embedded)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states after the last layer [T, D] -> [T, V] float32."""
        normed = self.norm(hidden)
        if self.config.tie_word_embeddings:
            out = project(normed, self.embed_tokens.embedding[...])
        else:
            out = self.lm_head(normed)
        return out.astype(jnp.float32)

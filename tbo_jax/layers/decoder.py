"""Decoder layers written as stages, and the causal language model around them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers.attention import SelfAttention
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.context import LayerContext
from tbo_jax.layers.linear import Linear, project, rms_norm
from tbo_jax.layers.mlp import GatedMlp, SparseMoe
from tbo_jax.stages import StackedLayers, Stage


def dispatch(message, context: LayerContext):
    """Tokens to the devices of their experts."""
    return context.exchange.dispatch(message)


def combine(message, context: LayerContext):
    """The experts' sums back to the tokens' devices."""
    return context.exchange.combine(message)


class DenseLayer(nnx.Module):
    """Attention and gated feed-forward: one stage, nothing to communicate."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.mlp = GatedMlp(config, config.intermediate_size, rngs=rngs)

    def attend_and_feed(self, hidden, received, cache, context: LayerContext):
        attended, cache = self.self_attn(self.input_layernorm(hidden), cache, context)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), None, cache

    def merge(self, hidden, received, context: LayerContext):
        return hidden

    stages = (Stage(attend_and_feed),)


class SparseLayer(nnx.Module):
    """Attention and mixture of experts: (attend, route | dispatch), (experts | combine).

    Shared experts take their input from what stays on the device and not from what was received,
    so that nothing need arrive first. With one micro-batch XLA can compute them while the dispatch
    is in flight; with two, the pin puts them beside the other one's dispatch.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = rms_norm(config.hidden_size, config, rngs)
        self.mlp = SparseMoe(config, rngs=rngs)

    def share_stack(self, stacked: SparseLayer, index: Any) -> None:
        """Leave the experts of layer `index` in the stack: see `ExpertWeights`."""
        self.mlp.share_stack(stacked.mlp, index)

    def attend_and_route(self, hidden, received, cache, context: LayerContext):
        attended, cache = self.self_attn(self.input_layernorm(hidden), cache, context)
        hidden = hidden + attended
        normed = self.post_attention_layernorm(hidden)
        message, slots = self.mlp.route(normed, context)
        kept = None if self.mlp.shared_experts is None else normed
        return (hidden, slots, kept), message, cache

    def run_experts(self, carry, received, cache, context: LayerContext):
        hidden, slots, normed = carry
        if normed is not None:
            hidden = hidden + self.mlp.shared(normed)
        return (hidden, slots), self.mlp.apply(received, context), cache

    def merge(self, carry, received, context: LayerContext):
        hidden, slots = carry
        return hidden + context.exchange.unpack_results(received, slots)

    stages = (Stage(attend_and_route, dispatch), Stage(run_experts, combine))


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
            (SparseLayer if config.is_sparse(i) else DenseLayer)(config, rngs=rngs)
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

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """[T] int32 -> [T, D]."""
        return self.embed_tokens(token_ids)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states after the last layer [T, D] -> [T, V] float32."""
        normed = self.norm(hidden)
        if self.config.tie_word_embeddings:
            out = project(normed, self.embed_tokens.embedding[...])
        else:
            out = self.lm_head(normed)
        return out.astype(jnp.float32)

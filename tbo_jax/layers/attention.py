"""Self-attention with grouped key/value heads and rotary positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.context import LayerContext
from tbo_jax.layers.linear import Linear, rms_norm
from tbo_jax.layers.rotary import apply_rotary
from tbo_jax.parallel.sharding import Shard


class SelfAttention(nnx.Module):
    """Projections around the attention that the context provides."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

        hidden, bias = config.hidden_size, config.attention_bias

        def project_to(count: int) -> Linear:
            return Linear(
                hidden, count * head_dim, config, bias=bias, sharded_outputs=count, rngs=rngs
            )

        self.q_proj = project_to(heads)
        self.k_proj, self.v_proj = project_to(kv_heads), project_to(kv_heads)
        self.o_proj = Linear(
            heads * head_dim,
            hidden,
            config,
            bias=config.attention_output_bias,
            sharded_inputs=heads,
            rngs=rngs,
        )
        if config.query_key_norm:
            self.q_norm = rms_norm(head_dim, config, rngs)
            self.k_norm = rms_norm(head_dim, config, rngs)
        sinks = jnp.zeros(heads, config.dtype) if config.attention_sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks, shard=Shard("tensor", 0, heads))
        self.query_key_norm = config.query_key_norm
        self.interleaved = config.rotary.interleaved
        self.head_dim, self.num_kv_heads = head_dim, kv_heads
        self.scale = head_dim**-0.5
        self.sliding_window = config.sliding_window

    def __call__(self, x: jax.Array, cache: Any, context: LayerContext) -> tuple[jax.Array, Any]:
        """[T, D], the layer's cache -> [T, D], cache.

        The sum over this device's heads: what `o_proj` has for a bias is left to the caller.
        """
        tokens = x.shape[0]
        q = self.q_proj(x).reshape(tokens, -1, self.head_dim)
        k = self.k_proj(x).reshape(tokens, -1, self.head_dim)
        v = self.v_proj(x).reshape(tokens, -1, self.head_dim)
        if self.num_kv_heads < context.tensor.size:
            k, v = context.tensor.own_head(k), context.tensor.own_head(v)
        if self.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rotary(q, context.rotary, interleaved=self.interleaved)
        k = apply_rotary(k, context.rotary, interleaved=self.interleaved)
        out, cache = context.attention(
            q, k, v, cache,
            scale=self.scale,
            sliding_window=self.sliding_window,
            sinks=None if self.sinks is None else self.sinks[...],
        )  # fmt: skip
        return self.o_proj.product(out.reshape(tokens, -1)), cache

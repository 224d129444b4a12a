"""Multi-head latent attention: keys and values of all heads come from one small vector a token.

DeepSeek-V2 (2024, section 2.1). Of each token the cache keeps the latent, of R elements, and one
rotary key that all heads share. A head's key is `key_up @ latent` with that rotary key behind it,
its value `value_up @ latent`. Neither is ever made: `q . (key_up @ latent)` is
`(q @ key_up) . latent`, so the queries go to the latent space, attend there as N heads to one
key/value head of R + rotary_dim elements, and what they bring back is taken out of it.

A pair of a token and a key costs 2 * (2R + rotary_dim) operations a head, where expanded keys and
values cost 2 * (plain_dim + rotary_dim + value_dim): 3.4 times as many for DeepSeek-V3. Decode
waits for the cache, which is read once for all heads. A prompt waits for the operations: with 4,096
tokens a layer takes 16 % more compute than with expanded keys (modelled for H100).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers.config import DecoderConfig, LatentConfig
from tbo_jax.layers.context import LayerContext
from tbo_jax.layers.linear import Linear, project_each, rms_norm
from tbo_jax.layers.rotary import apply_rotary
from tbo_jax.layers.stored import StoredRows
from tbo_jax.parallel.sharding import Shard

EPSILON = 1e-6  # of the norms of what is compressed, whatever the model's


class Expansion(nnx.Module):
    """From the latent to each head's key and value, for use on the other side of the product.

    Checkpoints keep both in one matrix, a head's key rows before its value rows. They are apart
    here because a product takes its factor whole: XLA would copy either half in every step.
    """

    def __init__(self, config: DecoderConfig, latent: LatentConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.initializer_range)

        period = latent.plain_dim + latent.value_dim

        def weight(rows: int, first: int, summed: int) -> nnx.Param:
            value = init(rngs.params(), (config.num_heads, rows, latent.rank), config.dtype)
            shard = Shard("tensor", 0, config.num_heads)
            stored = StoredRows(first, period)
            return nnx.Param(value, shard=shard, stored=stored, inputs=-1, summed=summed)

        self.key = weight(latent.plain_dim, 0, -2)
        self.value = weight(latent.value_dim, latent.plain_dim, -1)

    def queries(self, q: jax.Array) -> jax.Array:
        """[T, N, plain_dim] -> [T, N, R]: what a query asks of the latent."""
        return project_each(q, self.key[...], summed=-2)

    def values(self, out: jax.Array) -> jax.Array:
        """[T, N, R] -> [T, N, value_dim]: the value of a mean of latents."""
        return project_each(out, self.value[...], summed=-1)


class LatentAttention(nnx.Module):
    """Projections around the attention to the latents that the context provides.

    With tensor parallelism a device has some of the heads, and the whole cache.
    """

    def __init__(self, config: DecoderConfig, latent: LatentConfig, *, rngs: nnx.Rngs):
        hidden, heads, bias = config.hidden_size, config.num_heads, config.attention_bias

        def queries_from(size: int) -> Linear:
            width = heads * (latent.plain_dim + latent.rotary_dim)
            return Linear(size, width, config, sharded_outputs=heads, rngs=rngs)

        self.compressed_queries = latent.query_rank is not None
        if latent.query_rank is None:
            self.q_proj = queries_from(hidden)
        else:
            self.q_a_proj = Linear(hidden, latent.query_rank, config, bias=bias, rngs=rngs)
            self.q_a_layernorm = rms_norm(latent.query_rank, config, rngs, EPSILON)
            self.q_b_proj = queries_from(latent.query_rank)
        row = latent.rank + latent.rotary_dim
        self.kv_a_proj_with_mqa = Linear(hidden, row, config, bias=bias, rngs=rngs)
        self.kv_a_layernorm = rms_norm(latent.rank, config, rngs, EPSILON)
        self.kv_b_proj = Expansion(config, latent, rngs=rngs)
        self.o_proj = Linear(
            heads * latent.value_dim,
            hidden,
            config,
            bias=config.attention_output_bias,
            sharded_inputs=heads,
            rngs=rngs,
        )
        self.interleaved = config.rotary.interleaved
        self.sizes = latent

    def __call__(self, x: jax.Array, cache: Any, context: LayerContext) -> tuple[jax.Array, Any]:
        """[T, D], the layer's cache -> [T, D], cache; as that of `SelfAttention`."""
        tokens, sizes = x.shape[0], self.sizes
        q = self._queries(x).reshape(tokens, -1, sizes.plain_dim + sizes.rotary_dim)
        q = jnp.concatenate(
            [self.kv_b_proj.queries(q[..., : sizes.plain_dim]),
             self._rotated(q[..., sizes.plain_dim :], context)], axis=-1,
        )  # fmt: skip
        compressed = self.kv_a_proj_with_mqa(x)[:, None]  # [T, 1, R + rotary_dim]
        latent = self.kv_a_layernorm(compressed[..., : sizes.rank])
        rotary = self._rotated(compressed[..., sizes.rank :], context)
        keys = jnp.concatenate([latent, rotary], axis=-1)
        out, cache = context.attention(
            q, keys, latent, cache, scale=sizes.scale, sliding_window=None
        )
        return self.o_proj.product(self.kv_b_proj.values(out).reshape(tokens, -1)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        if not self.compressed_queries:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _rotated(self, x: jax.Array, context: LayerContext) -> jax.Array:
        return apply_rotary(x, context.rotary, interleaved=self.interleaved)

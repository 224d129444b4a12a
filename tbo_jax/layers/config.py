"""The shape of a decoder, in one dataclass that every architecture fills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from tbo_jax.layers.rotary import RotaryConfig
from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.routing import Routing


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention, in elements; see `LatentAttention`."""

    query_rank: int | None  # of the compressed queries; None: they are not compressed
    rank: int  # of the latent, from which all heads' keys and values come
    plain_dim: int  # of a head's query and key, without position
    rotary_dim: int  # of a head's query with rotary position, and of the key that all heads share
    value_dim: int  # of a head's value
    scale: float  # of the scores


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder. Sizes are in elements; `dtype` is of weights and compute.

    With latent attention `num_kv_heads` and `head_dim` are those of the cache and of what attends
    to it: one head, of the latent and the shared rotary key.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # longest context, in tokens, with YaRN's stretch
    rotary: RotaryConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    latent: LatentConfig | None = None
    attention_sinks: bool = False  # a learned one of each head; see `AttentionKernel`
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()  # without the sliding window
    num_experts: int = 0  # 0: no layer has experts
    expert_intermediate_size: int = 0
    expert_bias: bool = False  # of both products of every expert
    expert_activation: SwiGlu = SwiGlu()  # noqa: RUF009, frozen
    dense_layers: frozenset[int] = frozenset()  # layers without experts in a model that has them
    shared_expert_intermediate_size: int = 0  # of all shared experts together; 0: none
    shared_expert_gate: bool = False  # a sigmoid gate on what the shared experts give
    router: Routing | None = None  # how tokens choose their experts; None: there are none
    router_bias: bool = False  # added to the router's logits
    correction_bias: bool = False  # added to its scores for the choice; see `Routing`
    float32_router: bool = False  # its weight and product, whatever `dtype`
    num_prediction_layers: int = 0  # after the last one, for multi-token prediction: not loaded
    image_token_id: int | None = None  # tokens whose embeddings are given (`inputs_embeds`)
    initializer_range: float = 0.02
    dtype: Any = jnp.float32

    @property
    def value_dim(self) -> int:
        """Elements of a value in the cache."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def cached_elements(self) -> int:
        """What the cache of one layer holds of a token."""
        values = self.value_dim if self.latent is None else 0  # a part of the keys
        return self.num_kv_heads * (self.head_dim + values)

    @property
    def num_experts_per_token(self) -> int:
        """K, routed experts that each token goes to; 0 in a model without experts."""
        return 0 if self.router is None else self.router.top_k

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def of_device(self, tensor: int) -> DecoderConfig:
        """What one of `tensor` devices that share a rank sees: its heads.

        Raises:
            ValueError: heads, key/value heads or features of dense layers do not divide.
        """
        kv_heads = self.num_kv_heads
        shared = {"attention heads": self.num_heads}
        if not all(self.is_sparse(layer) for layer in range(self.num_layers)):
            shared["features of the feed-forward"] = self.intermediate_size
        for name, count in shared.items():
            if count % tensor:
                raise ValueError(
                    f"{count} {name} cannot be shared equally by {tensor} devices "
                    "(tensor parallelism)"
                )
        if kv_heads % tensor and tensor % kv_heads:
            raise ValueError(
                f"{kv_heads} key/value heads and {tensor} devices (tensor parallelism): expected "
                "one to be a multiple of the other"
            )
        heads, kv_heads = self.num_heads // tensor, max(1, kv_heads // tensor)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)

    def of_layer(self, layer: int) -> DecoderConfig:
        """The configuration as layer `layer` sees it: with the sliding window that it has."""
        if self.sliding_window is None or layer not in self.full_attention_layers:
            return self
        return replace(self, sliding_window=None)

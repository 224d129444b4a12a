"""Qwen3-MoE: Qwen3's attention; experts in every layer but those that the config names dense."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import FUSED, Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.models.qwen2_moe import dense_layers
from tbo_jax.moe.routing import Routing


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen3-MoE config.json."""
    hf.expect("use_sliding_window", False, None)
    return hf.common(
        dtype,
        query_key_norm=True,
        # Transformers 5 writes num_local_experts.
        num_experts=hf.num_experts("num_experts", "num_local_experts"),
        router=Routing(hf.number("num_experts_per_tok"), renormalize=hf.flag("norm_topk_prob")),
        expert_intermediate_size=hf.number("moe_intermediate_size"),
        dense_layers=dense_layers(hf),
    )


ARCHITECTURE = Architecture(parse_config, experts=(ExpertTensors(), FUSED))

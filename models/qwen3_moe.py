"""Qwen3-MoE: Qwen3's attention; experts in every layer but those that the config names dense."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.models.qwen2_moe import dense_layers


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen3-MoE config.json."""
    hf.expect("use_sliding_window", False, None)
    return hf.common(
        dtype,
        query_key_norm=True,
        # Transformers 5 writes num_local_experts.
        num_experts=hf.number("num_experts", hf.values.get("num_local_experts")),
        num_experts_per_token=hf.number("num_experts_per_tok"),
        expert_intermediate_size=hf.number("moe_intermediate_size"),
        renormalize_experts=hf.flag("norm_topk_prob"),
        dense_layers=dense_layers(hf),
    )


ARCHITECTURE = Architecture(parse_config, ExpertTensors())

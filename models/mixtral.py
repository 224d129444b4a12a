"""Mixtral: Llama's attention, experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Mixtral config.json."""
    window = hf.values.get("sliding_window")
    return hf.common(
        dtype,
        sliding_window=None if window is None else hf.number("sliding_window"),
        num_experts=hf.number("num_local_experts"),
        num_experts_per_token=hf.number("num_experts_per_tok"),
        expert_intermediate_size=hf.number("intermediate_size"),
    )


ARCHITECTURE = Architecture(
    parse_config,
    ExpertTensors(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{e}.w1.weight",
        up="block_sparse_moe.experts.{e}.w3.weight",
        down="block_sparse_moe.experts.{e}.w2.weight",
    ),
)

"""Mixtral: Llama's attention, experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import FUSED, Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.moe.routing import Routing


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Mixtral config.json."""
    return hf.common(
        dtype,
        sliding_window=hf.number("sliding_window") if "sliding_window" in hf else None,
        num_experts=hf.num_experts("num_local_experts"),
        router=Routing(hf.number("num_experts_per_tok")),
        expert_intermediate_size=hf.number("intermediate_size"),
    )


ARCHITECTURE = Architecture(
    parse_config,
    experts=(
        ExpertTensors(gate="w1", up="w3", down="w2", names={"mlp": "block_sparse_moe"}),
        FUSED,
    ),
)

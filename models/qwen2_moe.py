"""Qwen2-MoE and Qwen1.5-MoE: routed experts, and a shared one with a gate of its own."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.moe.routing import Routing


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen2-MoE config.json."""
    hf.expect("use_sliding_window", False, None)
    hf.no_windows()
    return hf.common(
        dtype,
        attention_bias=hf.flag("qkv_bias", True),
        attention_output_bias=False,
        num_experts=hf.num_experts("num_experts", "num_local_experts"),
        router=Routing(hf.number("num_experts_per_tok"), renormalize=hf.flag("norm_topk_prob")),
        expert_intermediate_size=hf.number("moe_intermediate_size"),
        shared_expert_intermediate_size=hf.number("shared_expert_intermediate_size"),
        shared_expert_gate=True,
        dense_layers=dense_layers(hf),
    )


def dense_layers(hf: HfConfig) -> frozenset[int]:
    """The layers without experts: those named, and all but every `decoder_sparse_step`-th.

    Raises:
        ValueError: `mlp_only_layers` names a layer that does not exist.
    """
    layers, period = hf.num_layers, hf.number("decoder_sparse_step", 1)
    named = hf.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(i in range(layers) for i in named):
        raise ValueError(f"{hf.source}: mlp_only_layers must list layers below {layers}: {named!r}")
    return frozenset(i for i in range(layers) if i in named or (i + 1) % period)


SHARED = {"mlp.shared_experts": "mlp.shared_expert"}
ARCHITECTURE = Architecture(
    parse_config, experts=(ExpertTensors(names=SHARED), ExpertTensors(fused="halves", names=SHARED))
)

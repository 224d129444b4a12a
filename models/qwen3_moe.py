"""Qwen3-MoE: Qwen3's attention; experts in every layer but those that the config names dense."""

from __future__ import annotations

from typing import Any

from tbo_jax.models.architecture import Architecture, ExpertTensors

from tbo_jax.layers.config import DecoderConfig, HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen3-MoE config.json."""
    hf.expect("use_sliding_window", False, None)
    layers, period = hf.number("num_hidden_layers"), hf.number("decoder_sparse_step", 1)
    named = hf.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(i in range(layers) for i in named):
        raise ValueError(f"{hf.source}: mlp_only_layers must list layers below {layers}: {named!r}")
    dense = {i for i in range(layers) if i in named or (i + 1) % period}
    return hf.common(
        dtype,
        query_key_norm=True,
        # Transformers 5 writes num_local_experts.
        num_experts=hf.number("num_experts", hf.values.get("num_local_experts")),
        num_experts_per_token=hf.number("num_experts_per_tok"),
        expert_intermediate_size=hf.number("moe_intermediate_size"),
        renormalize_experts=hf.flag("norm_topk_prob"),
        dense_layers=frozenset(dense),
    )


ARCHITECTURE = Architecture(
    parse_config,
    ExpertTensors(
        router="mlp.gate.weight",
        gate="mlp.experts.{e}.gate_proj.weight",
        up="mlp.experts.{e}.up_proj.weight",
        down="mlp.experts.{e}.down_proj.weight",
    ),
)

"""gpt-oss: attention with sinks and alternating windows, experts with biases and clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.moe.activation import SwiGlu

SLIDING, FULL = "sliding_attention", "full_attention"


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a gpt-oss config.json.

    Raises:
        ValueError: a key that is missing, wrong, or asks for what is not supported.
    """
    if not (hf.values.get("rope_scaling") or hf.values.get("rope_parameters")):
        raise ValueError(f"{hf.source}: rope_scaling is missing")
    bias = hf.flag("attention_bias", True)
    full = _full_attention_layers(hf)
    return hf.common(
        dtype,
        default_head_dim=64,
        default_theta=150000.0,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-5, float),
        attention_bias=bias,
        attention_output_bias=bias,
        attention_sinks=True,
        sliding_window=hf.number("sliding_window", 128),
        full_attention_layers=full,
        num_experts=hf.number("num_local_experts", hf.values.get("num_experts")),
        num_experts_per_token=hf.number("num_experts_per_tok"),
        expert_intermediate_size=hf.number("intermediate_size"),
        expert_bias=True,
        expert_activation=SwiGlu(
            alpha=hf.number("swiglu_alpha", 1.702, float),
            limit=hf.number("swiglu_limit", 7.0, float),
            up_offset=1.0,
        ),
        router_bias=True,
    )


def _full_attention_layers(hf: HfConfig) -> frozenset[int]:
    """By default every second layer, the first has the window."""
    layers = hf.number("num_hidden_layers")
    types = hf.values.get("layer_types")
    if types is None:
        return frozenset(range(1, layers, 2))
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"{hf.source}: layer_types must list {layers} layers, got {types!r}")
    if unknown := [kind for kind in types if kind not in (SLIDING, FULL)]:
        raise ValueError(
            f"{hf.source}: layer type {unknown[0]!r} is not supported, expected {SLIDING!r} or "
            f"{FULL!r}"
        )
    return frozenset(i for i, kind in enumerate(types) if kind == FULL)


ARCHITECTURE = Architecture(
    parse_config,
    ExpertTensors(router="mlp.router.weight", fused=True, down="mlp.experts.down_proj"),
)

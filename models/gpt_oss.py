"""gpt-oss: attention with sinks and alternating windows, experts with biases and clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture, ExpertTensors
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.routing import Routing


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a gpt-oss config.json.

    Raises:
        ValueError: a key that is missing, wrong, or asks for what is not supported.
    """
    if not ("rope_scaling" in hf or "rope_parameters" in hf):
        raise ValueError(f"{hf.source}: rope_scaling is missing")
    bias = hf.flag("attention_bias", True)
    return hf.common(
        dtype,
        default_head_dim=64,
        default_theta=150000.0,
        rms_norm_eps=hf.epsilon(1e-5),
        attention_bias=bias,
        attention_output_bias=bias,
        attention_sinks=True,
        sliding_window=hf.number("sliding_window", 128),
        full_attention_layers=hf.full_attention_layers(range(1, hf.num_layers, 2)),
        num_experts=hf.num_experts("num_local_experts", "num_experts"),
        router=Routing(hf.number("num_experts_per_tok")),
        expert_intermediate_size=hf.number("intermediate_size"),
        expert_bias=True,
        expert_activation=SwiGlu(
            alpha=hf.number("swiglu_alpha", 1.702, float),
            limit=hf.number("swiglu_limit", 7.0, float),
            up_offset=1.0,
        ),
        router_bias=True,
    )


ARCHITECTURE = Architecture(
    parse_config,
    experts=(ExpertTensors(fused="alternating", names={"mlp.gate": "mlp.router"}),),
)

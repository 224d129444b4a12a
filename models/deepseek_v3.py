"""DeepSeek-V3 and R1, and Kimi-K2 of other sizes: latent attention, sigmoid routing."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig, LatentConfig
from tbo_jax.layers.rotary import YarnScaling
from tbo_jax.models.architecture import FUSED, Architecture, ExpertTensors
from tbo_jax.models.glm4_moe import sigmoid_experts
from tbo_jax.models.hf_config import MOST_PARTS, HfConfig
from tbo_jax.models.hf_rotary import read_rotary


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a DeepSeek-V3 config.json."""
    heads = hf.number("num_attention_heads", most=MOST_PARTS)
    hf.expect("num_key_value_heads", heads, None)
    plain_dim, rotary_dim = hf.number("qk_nope_head_dim"), hf.number("qk_rope_head_dim")
    hf.expect("head_dim", rotary_dim, None)  # Transformers 5 writes it
    rotary = read_rotary(hf, rotary_dim, interleaved=hf.flag("rope_interleave", True))
    scaling = rotary.scaling
    growth = scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0
    latent = LatentConfig(
        query_rank=hf.number("q_lora_rank") if "q_lora_rank" in hf else None,
        rank=hf.number("kv_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=hf.number("v_head_dim"),
        scale=(plain_dim + rotary_dim) ** -0.5 * growth,
    )
    return hf.common(
        dtype,
        default_head_dim=rotary_dim,
        latent=latent,
        rotary=rotary,
        num_kv_heads=1,
        head_dim=latent.rank + rotary_dim,
        **sigmoid_experts(hf),
    )


ARCHITECTURE = Architecture(
    parse_config, experts=(ExpertTensors(), FUSED), ignored=("layers.{prediction}.",)
)

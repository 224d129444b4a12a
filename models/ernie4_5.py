"""ERNIE 4.5, dense: Llama's layer with neighbouring dimensions rotated together."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig

THETA = 500000.0  # where config.json has no rope_theta


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of an ERNIE 4.5 config.json."""
    bias = hf.flag("use_bias")
    return hf.common(
        dtype,
        default_head_dim=128,
        default_theta=THETA,
        interleaved_rotary=True,
        rms_norm_eps=hf.epsilon(1e-5),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
    )


ARCHITECTURE = Architecture(parse_config)

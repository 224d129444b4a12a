"""Llama 1 to 3 and the many models of its shape (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Llama config.json."""
    return hf.common(dtype, mlp_bias=hf.flag("mlp_bias"))


ARCHITECTURE = Architecture(parse_config)

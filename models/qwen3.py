"""Qwen3, dense: Llama's layer with a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen3 config.json."""
    hf.expect("use_sliding_window", False, None)
    hf.no_windows()
    return hf.common(dtype, query_key_norm=True, default_head_dim=128)


ARCHITECTURE = Architecture(parse_config)

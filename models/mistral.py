"""Mistral, dense: Llama's layer, in the first version with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Mistral config.json."""
    hf.expect("layer_types", None)
    # Absent is not null: the first version has a window.
    windowed = hf.values.get("sliding_window", 4096) is not None
    return hf.common(dtype, sliding_window=hf.number("sliding_window", 4096) if windowed else None)


ARCHITECTURE = Architecture(parse_config)

"""Qwen2 and Qwen2.5, dense: Llama's layer with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen2 config.json.

    With `use_sliding_window` the layers from `max_window_layers` on have the window.
    """
    hf.expect("use_mrope", False, None)
    windows = hf.flag("use_sliding_window") and hf.values.get("sliding_window", 4096) is not None
    if not windows:
        hf.no_windows()
    first = hf.number("max_window_layers", 28, least=0)
    return hf.common(
        dtype,
        attention_bias=True,
        attention_output_bias=False,
        sliding_window=hf.number("sliding_window", 4096) if windows else None,
        full_attention_layers=hf.full_attention_layers(range(min(first, hf.num_layers)))
        if windows
        else frozenset(),
    )


ARCHITECTURE = Architecture(parse_config)

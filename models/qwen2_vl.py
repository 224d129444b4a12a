"""The language model of Qwen2-VL: Llama's layer with biases on query, key and value, and M-RoPE.

The vision tower is left out: what it makes of images comes as `inputs_embeds` of the tokens with
`image_token_id`, and their places in time, height and width as positions [3, T].
"""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a Qwen2-VL config.json."""
    # Transformers 5 writes what is of the language model into an object of its own.
    nested = hf.nested("text_config")
    text = nested if nested.values else hf
    text.expect("use_sliding_window", False, None)
    text.no_windows()
    tied = "tie_word_embeddings"
    return text.common(
        dtype,
        model_type=hf.values["model_type"],
        tie_word_embeddings=hf.flag(tied) or text.flag(tied),
        default_theta=1000000.0,
        mrope=True,
        attention_bias=True,
        image_token_id=hf.number("image_token_id", 151655, least=0),
    )


ARCHITECTURE = Architecture(
    parse_config,
    prefixes=("model.language_model.", "model.", "language_model.", ""),
    ignored=("visual.",),
)

"""Architectures by the `model_type` of their config.json. A new one is a file and a line here."""

from __future__ import annotations

from tbo_jax.models import (
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_moe,
)
from tbo_jax.models.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v3": deepseek_v3.ARCHITECTURE,
    "ernie4_5": ernie4_5.ARCHITECTURE,
    "ernie4_5_moe": ernie4_5_moe.ARCHITECTURE,
    "glm4_moe": glm4_moe.ARCHITECTURE,
    "gpt_oss": gpt_oss.ARCHITECTURE,
    "kimi_k2": deepseek_v3.ARCHITECTURE,
    "llama": llama.ARCHITECTURE,
    "mistral": mistral.ARCHITECTURE,
    "mixtral": mixtral.ARCHITECTURE,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen2_moe": qwen2_moe.ARCHITECTURE,
    "qwen2_vl": qwen2_vl.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "qwen3_moe": qwen3_moe.ARCHITECTURE,
}


def find_architecture(model_type: object) -> Architecture:
    """The architecture of a config.json's `model_type`.

    Raises:
        ValueError: unknown, naming those that are known.
    """
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"model_type {model_type!r} is not supported: expected one of {known}")
    return ARCHITECTURES[model_type]

"""Architectures by the `model_type` of their config.json. A new one is a file and a line here."""

from __future__ import annotations

from tbo_jax.models import llama, mixtral, qwen3, qwen3_moe
from tbo_jax.models.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama.ARCHITECTURE,
    "mixtral": mixtral.ARCHITECTURE,
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

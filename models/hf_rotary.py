"""Rotary positions as a Hugging Face config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tbo_jax.layers.rotary import SUPPORTED, RotaryConfig


def read_rotary(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    mrope: bool = False,
) -> RotaryConfig:
    """Read `rope_theta` and `rope_scaling`, or the newer `rope_parameters`, of a config.json.

    Args:
        config: contents of config.json.
        head_dim: dimensions of a head.
        theta: where the file has none.
        partial: `partial_rotary_factor` where the file has none; None: the architecture has no
            such option, and anything but 1 is refused.
        interleaved: see `apply_rotary`.
        mrope: the architecture has M-RoPE; without, sections are refused.

    Raises:
        ValueError: a scaling type that is not supported, or one that lacks a key; a number of
            rotated dimensions that is no even number up to `head_dim`.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling must be an object, got {given!r}")
    parameters = dict(given)
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or theta
    named = parameters.pop("rope_type", None)
    legacy = parameters.pop("type", None)
    kind = named or legacy or "default"
    sections = _sections(parameters, kind) if mrope else None
    kind = "default" if mrope and kind == "mrope" else kind
    if kind not in SUPPORTED:
        raise ValueError(
            f"RoPE scaling type {kind!r} is not supported: expected one of {', '.join(SUPPORTED)}"
        )
    share = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = (partial or 1.0) if share is None else share
    if partial is None and share != 1:
        raise ValueError(f"partial_rotary_factor {share} is not supported: expected 1.0")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be above 0, at most 1, got {share!r}")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"{dim} dimensions of a head of {head_dim} would be rotated: pairs need an even "
            "number, 2 or more"
        )
    if sections is not None and sum(sections) != dim // 2:
        raise ValueError(
            f"mrope_section {list(sections)} must be {dim // 2} frequencies in all, as many as "
            f"a head of {dim} rotated dimensions has"
        )
    if parameters.get("mrope_section") is not None:
        raise ValueError("mrope_section is not supported by this architecture")
    needed = {"linear": ["factor"], "yarn": ["factor"], "default": []}
    needed["llama3"] = [
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ]  # fmt: skip
    missing = [key for key in needed[kind] if parameters.get(key) is None]
    if missing:
        raise ValueError(f"RoPE scaling {kind!r} needs {', '.join(missing)} in config.json")
    for key in needed[kind]:
        if isinstance(parameters[key], bool) or not isinstance(parameters[key], int | float):
            raise ValueError(f"RoPE scaling {key} must be a number, got {parameters[key]!r}")
    options = tuple(sorted((k, v) for k, v in parameters.items() if v is not None))
    longest = int(config.get("max_position_embeddings") or 2048)
    return RotaryConfig(dim, float(theta), longest, kind, options, interleaved, sections)


def _sections(parameters: dict[str, Any], kind: str) -> tuple[int, ...] | None:
    """Takes the keys of M-RoPE out of `rope_scaling`."""
    given = parameters.pop("mrope_section", None)
    if parameters.pop("mrope_interleaved", False):
        raise ValueError("mrope_interleaved true is not supported: expected sections side by side")
    if given is None and kind != "mrope":
        return None
    numbers = given if isinstance(given, list | tuple) else []
    if len(numbers) != 3 or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(f"mrope_section must be three positive integers, got {given!r}")
    return tuple(numbers)

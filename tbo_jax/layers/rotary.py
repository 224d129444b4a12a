"""Rotary position embeddings and the scalings of their frequencies that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SUPPORTED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary frequencies as a checkpoint describes them.

    `dim` is the number of dimensions of a head that are rotated, from the first on. `kind` is one
    of `SUPPORTED`; `options` are the further keys of `rope_scaling`, as sorted (name, value) pairs
    so that the configuration can be hashed. For `interleaved` see `apply_rotary`. With `sections`,
    three numbers of frequencies, the first so many turn with the temporal position, the next with
    the height, the last with the width (M-RoPE; Wang et al. 2024, Qwen2-VL).
    """

    dim: int
    theta: float
    max_position_embeddings: int
    kind: str = "default"
    options: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False
    sections: tuple[int, ...] | None = None


def rotary_frequencies(config: RotaryConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [dim / 2] float32, and the factor of cosine and sine.

    Sources: RoFormer (Su et al. 2021); linear position interpolation (Chen et al. 2023); YaRN
    (Peng et al. 2023, sections 3.2 to 3.4); the wavelength bands of Llama 3.1.
    """
    dim, options = config.dim, dict(config.options)
    frequency = 1.0 / config.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.kind == "default":
        return frequency.astype(np.float32), 1.0
    factor = float(options["factor"])
    if config.kind == "linear":
        return (frequency / factor).astype(np.float32), 1.0
    if config.kind == "llama3":
        return _llama3(frequency, factor, options).astype(np.float32), 1.0
    return _yarn(frequency, factor, options, config)


def _llama3(frequency: np.ndarray, factor: float, options: Mapping[str, Any]) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    original = options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = original * frequency / (2 * math.pi)  # rotations within the original context
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequency / factor + blend * frequency


def _yarn(
    frequency: np.ndarray, factor: float, options: Mapping[str, Any], config: RotaryConfig
) -> tuple[np.ndarray, float]:
    """Dimensions that turn often are kept, slow ones interpolated, with a ramp between."""
    original = options.get("original_max_position_embeddings", config.max_position_embeddings)
    dim = config.dim

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = dimension_of(options.get("beta_fast", 32))
    high = dimension_of(options.get("beta_slow", 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    mixed = ramp * frequency / factor + (1 - ramp) * frequency

    attention = options.get("attention_factor")
    mscale, mscale_all = options.get("mscale"), options.get("mscale_all_dim")
    if attention is None and mscale and mscale_all:
        attention = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    elif attention is None:
        attention = _magnitude(factor)
    return mixed.astype(np.float32), float(attention)


def _magnitude(scale: float, weight: float = 1.0) -> float:
    """YaRN's growth of attention with the stretch of the context, times `weight`."""
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def score_factor(config: RotaryConfig) -> float:
    """What DeepSeek multiplies the scores of attention by for YaRN's `mscale_all_dim`.

    It is the square of the magnitude that `rotary_frequencies` divides cosine and sine by, so that
    the elements without rotary position are scaled like the others (DeepSeek-V2's code).
    """
    options = dict(config.options)
    weight = options.get("mscale_all_dim")
    if config.kind == "default" or not weight:
        return 1.0
    return _magnitude(float(options["factor"]), weight) ** 2


def rotary_table(config: RotaryConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, dim / 2] float32 at `positions` [T] int32.

    With `config.sections` also at positions [3, T], which for text are three equal ones.
    """
    frequency, factor = rotary_frequencies(config)
    at = positions.astype(jnp.float32)[:, None]
    if positions.ndim == 2:
        assert config.sections is not None
        at = positions.astype(jnp.float32)[np.repeat(np.arange(3), config.sections)].T
    angle = at * jnp.asarray(frequency)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def look_up_rotary(
    tables: jax.Array, rows: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, F] float32 from a table of each sequence.

    Args:
        tables: [B, 2, L, F], see `ForwardBatch.rotary_tables`.
        rows: [T] int32, the sequence of each token.
        positions: [T] int32. Beyond L the result is NaN: nothing is known there.
    """
    found = tables.at[rows, :, positions].get(mode="fill", fill_value=jnp.nan)
    return found[:, 0], found[:, 1]


def apply_rotary(
    x: jax.Array, rotary: tuple[jax.Array, jax.Array], *, interleaved: bool = False
) -> jax.Array:
    """Rotate the first dim dimensions of [T, N, H] by a table [T, dim / 2]; the others stay.

    A pair is dimensions i and i + dim / 2, as most checkpoints have it, or with `interleaved`
    2i and 2i + 1, as RoFormer has it.
    """
    cos, sin = (t[:, None, :] for t in rotary)
    half = cos.shape[-1]
    turned, kept = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        turned = jnp.stack(pair, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(pair, axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, kept], axis=-1) if kept.shape[-1] else turned

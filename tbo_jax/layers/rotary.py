"""Rotary position embeddings and the scalings of their frequencies that checkpoints ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The wavelength bands of Llama 3.1: long ones are stretched, short ones kept, with a blend."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float  # above the low one
    original_context: int  # tokens that the model was trained on before


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): slow dimensions are interpolated, and attention is sharpened."""

    factor: float
    original_context: int  # tokens that the model was trained on before
    beta_fast: float = 32.0  # turns in that context, from which on a dimension is kept
    beta_slow: float = 1.0  # up to which it is interpolated
    truncate: bool = True  # round the bounds of the ramp between the two
    mscale: float = 0.0  # DeepSeek-V2's weights of the magnitude; 0: not given
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # the magnitude itself, in place of the formula
    attn_factor: float = 1.0  # of the magnitude that the formula gives (the authors' code, vLLM)

    @property
    def context(self) -> int:
        """Tokens of the stretched context."""
        return int(self.original_context * self.factor)

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine (section 3.4)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.attn_factor * self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self.attn_factor * self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek multiplies the scores of attention by for `mscale_all_dim`.

        It is the square of what `magnitude` is divided by, so that the elements without rotary
        position are scaled like the others (DeepSeek-V2's code).
        """
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, weight: float) -> float:
        """Of attention with the stretch of the context."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary frequencies as a checkpoint describes them.

    `dim` is the number of dimensions of a head that are rotated, from the first on, and `theta` the
    base of their frequencies. For `interleaved` see `apply_rotary`. With `sections`, three numbers
    of frequencies, the first so many turn with the temporal position, the next with the height, the
    last with the width (M-RoPE; Wang et al. 2024, Qwen2-VL).
    """

    dim: int
    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False
    sections: tuple[int, ...] | None = None


def rotary_frequencies(config: RotaryConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [dim / 2] float32 (RoFormer, Su et al. 2021), scaled as `config` asks.

    And the factor of cosine and sine.
    """
    frequency = 1.0 / config.theta ** (np.arange(0, config.dim, 2, dtype=np.float64) / config.dim)
    factor = 1.0
    match config.scaling:
        case LinearScaling() as linear:
            frequency = frequency / linear.factor
        case Llama3Scaling() as llama3:
            frequency = _llama3(frequency, llama3)
        case YarnScaling() as yarn:
            frequency, factor = _yarn(frequency, yarn, config), yarn.magnitude
    return frequency.astype(np.float32), factor


def _llama3(frequency: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * frequency / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def _yarn(frequency: np.ndarray, scaling: YarnScaling, config: RotaryConfig) -> np.ndarray:
    """Sections 3.2 and 3.3: a ramp over the dimensions, between those kept and interpolated."""
    dim = config.dim

    def dimension_of(turns: float) -> float:
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return ramp * frequency / scaling.factor + (1 - ramp) * frequency


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

"""Random quantised arrays, and what they stand for, worked out number by number in numpy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tbo_jax.quantized.array import Format, QuantizedArray

FORMS = {
    "fp8, blocks": Format("fp8", (128, 128)),
    "fp8, a factor for each output": Format("fp8", (1, 512)),
    "fp8, one factor": Format("fp8", (512, 512)),
    "fp8, odd blocks": Format("fp8", (20, 32)),
    "int8, a factor for each output": Format("int8", (1, 512)),
    "int8, groups": Format("int8", (1, 32)),
    "int4, groups of 128": Format("int4", (1, 128)),
    "int4, groups of 32": Format("int4", (1, 32)),
    "mxfp4": Format("mxfp4", (1, 32)),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def random_array(
    form: Format,
    shape: tuple[int, ...],
    seed: int = 0,
    zeros: bool = False,
    scale: Any = np.float32,
) -> QuantizedArray:
    """Numbers of every kind that the form has, with factors about 1."""
    rng = np.random.default_rng(seed)
    values: Any = rng.integers(0, 256, form.values_shape(shape), np.uint8)
    scales: Any = rng.uniform(0.5, 1.5, form.scales_shape(shape)).astype(scale)
    if form.kind == "fp8":
        values = rng.normal(size=values.shape).astype(ml_dtypes.float8_e4m3fn)
    elif form.kind == "int8":
        values = values.view(np.int8)
    elif form.kind == "mxfp4":
        scales = rng.integers(120, 132, scales.shape, np.uint8)
    zero = jnp.asarray(rng.integers(0, 16, scales.shape, np.uint8)) if zeros else None
    return QuantizedArray(jnp.asarray(values), jnp.asarray(scales), zero, form)


def decoded_in_numpy(array: QuantizedArray) -> np.ndarray:
    """[..., N, K] float32."""
    form, shape = array.format, array.shape
    raw = np.asarray(array.values)
    if form.is_packed:
        whole = np.zeros(shape, np.uint8)
        low: list[Any] = [slice(None)] * len(shape)
        high = list(low)
        low[form.packed], high[form.packed] = slice(0, None, 2), slice(1, None, 2)
        whole[tuple(low)], whole[tuple(high)] = raw & 15, raw >> 4
        raw = whole
    at = [np.arange(shape[axis]) // form.block[axis] for axis in (-2, -1)]
    factors = np.asarray(array.scales)[..., at[0][:, None], at[1]].astype(np.float32)
    if form.kind == "mxfp4":
        numbers = np.where(raw & 8, -1, 1) * E2M1[raw & 7]
        return (numbers * np.exp2(factors - 127)).astype(np.float32)
    numbers = raw.astype(np.float32)
    if form.kind == "int4":
        zeros = 8
        if array.zeros is not None:
            zeros = np.asarray(array.zeros)[..., at[0][:, None], at[1]].astype(np.float32)
        numbers = numbers - zeros
    return numbers * factors

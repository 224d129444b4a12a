"""Float32 that is float32, where the default of JAX lets products of it be rounded."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp


def exact_products(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    """The context to trace a model of `dtype` in, so that its products have that precision.

    By JAX's default XLA:GPU rounds the operands of a float32 product to TF32 (10 bits of 23) and
    XLA:TPU to bfloat16 (7 bits). "highest" has them multiplied as they are.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()

"""Keys and values that the cache holds in 8 bits, each head of each token with a factor.

The factor is found when a token is written: its largest magnitude becomes the largest value of the
type. Nothing has to be calibrated, no later token changes what is there, and an outlier costs its
own token and head precision alone. With heads of 128 elements a float32 factor adds 3 % of bytes.

A factor is common to the products of a key with all queries, so it multiplies the scores, and that
of a value the weights of the softmax; keys and values are multiplied as they are stored, which
bfloat16 and float32 hold exactly. A key of latents has one factor, as a key and as a value.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tbo_jax.quantized.array import as_bits, decode_e4m3

CacheDtype = Literal["float8_e4m3fn", "int8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)

# What the cache holds. Of float8_e4m3fn it is the bits: XLA:CPU gathers bytes at memory speed, and
# other types of 8 bits one by one.
STORED_AS: dict[CacheDtype, Any] = {"float8_e4m3fn": jnp.uint8, "int8": jnp.int8}
_SMALLEST = 1e-30  # largest magnitude of a head that is still told from zero


def bytes_of_token(elements: int, heads: int, width: int, dtype: CacheDtype | None) -> int:
    """Bytes of what a layer holds of a token.

    `elements` of `heads` keys and values together, of `width` bytes each if `dtype` is None.
    """
    return elements * width if dtype is None else elements + 4 * heads


def round_heads(new: jax.Array, stored_as: Any) -> tuple[jax.Array, jax.Array]:
    """Round keys or values [T, G, H] to 8 bits, and find their factors [T, G] float32.

    `stored_as` is one of `STORED_AS`. Numbers times factors are what was given. A head with a NaN
    has a NaN for a factor.
    """
    is_int8 = stored_as == jnp.int8
    wide = new.astype(jnp.float32)
    factors = jnp.maximum(jnp.abs(wide).max(-1), _SMALLEST) / (127.0 if is_int8 else 448.0)
    scaled = wide / factors[..., None]
    if is_int8:
        return jnp.round(scaled).astype(jnp.int8), factors
    return as_bits(scaled.astype(jnp.float8_e4m3fn)), factors


def numbers(stored: jax.Array, dtype: Any) -> jax.Array:
    """What is stored, without its factors, in `dtype`; what is no integer stays as it is."""
    if stored.dtype == jnp.int8:
        return stored.astype(dtype)
    if stored.dtype == jnp.uint8:
        return decode_e4m3(stored).astype(dtype)
    return stored

"""What travels between devices: which token goes where, and how a token is packed in a message.

A token's message is one row of one array: hidden state, weights of its experts, and their ids. The
payload may be rounded to 8 bits with a scale for each token, as the dispatch of DeepEP (DeepSeek-AI
2025) rounds it; the sums of the experts travel back as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

DispatchDtype = Literal["float8_e4m3fn", "int8"]
DISPATCH_DTYPES: tuple[DispatchDtype, ...] = get_args(DispatchDtype)

# Expert ids travel as two digits in the dtype of the hidden state: bfloat16 holds integers exactly
# up to 256. That keeps the message one differentiable array of one dtype.
_DIGIT = 256
_SMALLEST = 1e-30  # what largest magnitude of a token is still told from zero in 8 bits


@dataclass(frozen=True)
class Placement:
    """Which of a device's T tokens go to which of R devices, numbered for each in token order."""

    wanted: jax.Array  # [T, R] bool: the device has an expert of the token
    before: jax.Array  # [T, R] int32, how many earlier tokens go to the device
    count: jax.Array  # [R] int32, tokens that go to the device

    @classmethod
    def of(cls, experts: jax.Array, num_devices: int, experts_per_device: int) -> Placement:
        """Of [T, K] global expert ids; negative ones go nowhere. A token goes to a device once."""
        device = jnp.arange(num_devices, dtype=jnp.int32)
        owner = jnp.where(experts >= 0, experts // experts_per_device, -1)
        wanted = (owner[:, :, None] == device).any(1)
        end = jnp.cumsum(wanted, axis=0, dtype=jnp.int32)
        return cls(wanted, end - 1, end[-1])

    def places(self, start: jax.Array, rows: int) -> jax.Array:
        """[T, R] row of each token in a message of `rows` rows, or `rows` where it does not go.

        `start` [R] is the first row of each device.
        """
        return jnp.where(self.wanted, start + self.before, rows)


def rows_at(places: jax.Array, rows: int) -> jax.Array:
    """The token in each row of a message, the inverse of `Placement.places`: [rows], T for none."""
    tokens, devices = places.shape
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    empty = jnp.full(rows, tokens, jnp.int32)
    return empty.at[places].set(jnp.broadcast_to(token, (tokens, devices)), mode="drop")


def take(values: jax.Array, index: jax.Array, fill: float = 0) -> jax.Array:
    """`values[index]`, and `fill` where the index is behind the end."""
    return values.at[index].get(mode="fill", fill_value=fill)


def sum_returned(returned: jax.Array, places: jax.Array) -> jax.Array:
    """What came back [rows, D] to the tokens: the sum over a token's places, [T, D]."""
    return take(returned, places).sum(1)


def local_experts(
    experts: jax.Array, axis: str | tuple[str, ...], experts_per_device: int
) -> jax.Array:
    """Global expert ids -> index among this device's experts; outside [0, E) when not here."""
    first = jax.lax.axis_index(axis) * experts_per_device
    return jnp.where(experts < 0, -1, experts - first)


@dataclass(frozen=True)
class MessageFormat:
    """How the rows of a message are written and read.

    Without `dispatch_dtype` a row is the hidden state, the weights, and the ids in two digits each,
    all in the dtype of the hidden state, D + 3K elements; it is differentiable.

    With `dispatch_dtype` a row is bytes: D values of that type, their float32 scale (the largest
    magnitude of the token is the largest value of the type), the weights in the dtype of the hidden
    state and the ids as int32. Of normally distributed values, D = 2,048, the root mean square
    error is 2.65 % (float8_e4m3fn) or 0.85 % (int8) of theirs; int8 loses more where a few values
    of a token are far larger than the others, float8_e4m3fn does not. Rounding has no gradient.

    In both, zeros fill up what goes beside the hidden state to a multiple of 16 bytes. GPUs move so
    many at a time, and a ragged exchange starts at any row.
    """

    top_k: int
    dispatch_dtype: DispatchDtype | None = None
    dtype: Any = None  # of the hidden state; needed with dispatch_dtype

    def join(self, hidden: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """[..., D], [..., K] int32 (negative: no expert), [..., K] -> [..., W].

        A row of zeros names no expert. Raises ValueError for hidden states of another dtype than
        the format was made for.
        """
        if self.dispatch_dtype is None:
            return _join(hidden, experts, weights)
        if hidden.dtype != self.dtype:
            raise ValueError(
                f"the exchange was made for hidden states of {jnp.dtype(self.dtype)}, got "
                f"{hidden.dtype}"
            )
        return _join_bytes(self.dispatch_dtype, hidden, experts, weights)

    def part(self, message: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The inverse of `join`; of a rounded hidden state what the rounding left."""
        if self.dispatch_dtype is None:
            return _part(message, self.top_k)
        return _part_bytes(self.dispatch_dtype, message, self.top_k, self.dtype)

    def row_bytes(self, hidden_size: int, dtype: Any) -> int:
        """Bytes of a row for hidden states [D] of `dtype`."""
        width = jnp.dtype(dtype).itemsize
        if self.dispatch_dtype is None:
            return hidden_size * width + _filled(3 * self.top_k * width)
        return hidden_size + _filled(4 + self.top_k * (width + 4))

    def round_trip_bytes(self, hidden_size: int, dtype: Any) -> int:
        """Bytes of a row, and of the sum [D] that travels back for it."""
        return self.row_bytes(hidden_size, dtype) + hidden_size * jnp.dtype(dtype).itemsize


def _filled(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // 16) * 16


def _join(hidden: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    shifted = experts + 1  # 0: no expert
    digits = [shifted // _DIGIT, shifted % _DIGIT]
    beside = [weights.astype(hidden.dtype), *(d.astype(hidden.dtype) for d in digits)]
    return jnp.concatenate([hidden, *_fill(beside)], axis=-1)


def _fill(beside: list[jax.Array]) -> list[jax.Array]:
    """Arrays [..., n] of one dtype, and zeros up to a multiple of 16 bytes if they are needed."""
    first, width = beside[0], beside[0].dtype.itemsize
    size = sum(part.shape[-1] for part in beside) * width
    missing = (_filled(size) - size) // width
    zeros = jnp.zeros((*first.shape[:-1], missing), first.dtype)
    return [*beside, zeros] if missing else beside


def _part(message: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    itemsize = message.dtype.itemsize
    width = message.shape[-1] - _filled(3 * top_k * itemsize) // itemsize
    borders = [width + i * top_k for i in range(4)]
    hidden, weights, high, low, _ = jnp.split(message, borders, axis=-1)
    digits = (jax.lax.stop_gradient(d).astype(jnp.int32) for d in (high, low))
    experts = next(digits) * _DIGIT + next(digits) - 1
    return hidden, experts, weights


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _join_bytes(
    dtype: DispatchDtype, hidden: jax.Array, experts: jax.Array, weights: jax.Array
) -> jax.Array:
    whole = hidden.astype(jnp.float32)
    kind = jnp.dtype(dtype)
    most = float(jnp.iinfo(kind).max if dtype == "int8" else jnp.finfo(kind).max)
    largest = jnp.max(jnp.abs(whole), axis=-1, keepdims=True)
    scale = jnp.maximum(largest, _SMALLEST) / most
    scaled = whole / scale
    values = (jnp.round(scaled) if dtype == "int8" else scaled).astype(kind)
    beside = [scale, weights.astype(hidden.dtype), experts + 1]  # 0: no expert
    parts = [_to_bytes(values), *_fill([_to_bytes(part) for part in beside])]
    return jnp.concatenate(parts, axis=-1)


@_join_bytes.defjvp
def _refuse_to_train(dtype, primals, tangents):
    raise ValueError(
        f"dispatch_dtype {dtype!r} rounds the message and has no gradient: train with None"
    )


def _part_bytes(
    kind: DispatchDtype, message: jax.Array, top_k: int, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    ids, scales = 4 * top_k, jnp.dtype(dtype).itemsize * top_k
    width = message.shape[-1] - _filled(4 + scales + ids)
    borders = [width, width + 4, width + 4 + scales, width + 4 + scales + ids]
    values, scale, weights, experts, _ = jnp.split(message, borders, axis=-1)
    hidden = _from_bytes(values, jnp.dtype(kind)).astype(jnp.float32)
    hidden = (hidden * _from_bytes(scale, jnp.float32)).astype(dtype)
    return hidden, _from_bytes(experts, jnp.int32) - 1, _from_bytes(weights, dtype)


def _to_bytes(values: jax.Array) -> jax.Array:
    """[..., N] -> [..., N * itemsize] uint8."""
    raw = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def _from_bytes(raw: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_to_bytes`."""
    width = jnp.dtype(dtype).itemsize
    if width > 1:
        raw = raw.reshape(*raw.shape[:-1], -1, width)
    return jax.lax.bitcast_convert_type(raw, dtype)

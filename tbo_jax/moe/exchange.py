"""Expert exchange: tokens travel to the devices of their experts, and sums travel back.

One interface, several transports, equal in result. An exchange is used in three computes with two
communications between them, which is what a schedule can overlap:

    message, slots = pack(...)         in the stage that routes
    received = dispatch(message)       communication
    rows = unpack(received)            in the stage of the experts
    returned = combine(pack_results(...))   communication
    unpack_results(returned, slots)    at the head of the next stage

A token is sent to a device once, however many of its experts live there, and nothing is dropped
whatever the routing. Hidden state, weights and expert ids travel in one message: a second, small
collective for the ids took the place beside the large matrix product, and the payload then ran
exposed (measured on the schedule for 8x H100).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

Transport = Literal["all_to_all", "all_gather"]
TRANSPORTS: tuple[Transport, ...] = ("all_to_all", "all_gather")


class Exchange(Protocol):
    """What the mixture-of-experts block asks of a transport. T tokens, K experts each, D hidden."""

    def pack(self, hidden, experts, weights) -> tuple[Any, Any]:
        """[T, D], [T, K] int32 global ids (negative: no expert), [T, K] -> message, slots."""

    def dispatch(self, message: Any) -> Any:
        """The first communication."""

    def unpack(self, received: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """received -> rows [M, D], ids among this device's experts [M, K], weights [M, K]."""

    def pack_results(self, results: jax.Array) -> Any:
        """[M, D] -> message."""

    def combine(self, message: Any) -> Any:
        """The second communication."""

    def unpack_results(self, returned: Any, slots: Any) -> jax.Array:
        """returned, slots -> [T, D]."""


def make_exchange(
    transport: Transport, *, axis: str, num_devices: int, num_experts: int, top_k: int
) -> Exchange:
    """The exchange of `num_experts` experts, `top_k` a token, sharded over the mesh axis `axis`.

    Raises:
        ValueError: unknown transport, or the experts do not divide over the devices.
    """
    if transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise ValueError(f"unknown transport {transport!r}: expected one of {known}")
    check_divisible(num_experts, num_devices)
    if num_devices == 1:
        return LocalExchange()
    make = PaddedAllToAll if transport == "all_to_all" else AllGather
    return make(axis, num_devices, num_experts // num_devices, top_k)


def check_divisible(num_experts: int, num_devices: int) -> None:
    """Raise ValueError, naming the device counts that work, unless devices divide the experts."""
    if num_experts % num_devices:
        works = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{num_experts} experts cannot be shared equally by {num_devices} devices; "
            f"device counts that work: {', '.join(works)}"
        )


@dataclass(frozen=True)
class LocalExchange:
    """All experts on one device: nothing travels."""

    def pack(self, hidden, experts, weights):
        return (hidden, experts, weights), None

    def dispatch(self, message):
        return message

    def unpack(self, received):
        return received

    def pack_results(self, results):
        return results

    def combine(self, message):
        return message

    def unpack_results(self, returned, slots):
        return returned


@dataclass(frozen=True)
class AllGather:
    """Every token to every device by all-gather; the partial sums back by reduce-scatter."""

    axis: str
    num_devices: int
    experts_per_device: int
    top_k: int

    def pack(self, hidden, experts, weights):
        return _join(hidden, experts, weights), None

    def dispatch(self, message):
        return jax.lax.all_gather(message, self.axis, tiled=True)

    def unpack(self, received):
        hidden, experts, weights = _part(received, self.top_k)
        return hidden, _local(experts, self.axis, self.experts_per_device), weights

    def pack_results(self, results):
        return results

    def combine(self, message):
        return jax.lax.psum_scatter(message, self.axis, tiled=True)

    def unpack_results(self, returned, slots):
        return returned


@dataclass(frozen=True)
class PaddedAllToAll:
    """Each device's tokens packed per destination, in blocks of T slots, by `all_to_all`.

    T slots hold all tokens of a device, so that no routing overflows them.
    """

    axis: str
    num_devices: int
    experts_per_device: int
    top_k: int

    def pack(self, hidden, experts, weights):
        device = jnp.arange(self.num_devices, dtype=jnp.int32)
        owner = jnp.where(experts >= 0, experts // self.experts_per_device, -1)
        wanted = (owner[:, :, None] == device).any(1)  # [T, R]
        slots = jnp.cumsum(wanted, axis=0, dtype=jnp.int32) - 1
        order = jnp.argsort(~wanted, axis=0, stable=True).T  # [R, T], wanted tokens first
        filled = jnp.arange(hidden.shape[0]) < wanted.sum(0)[:, None]
        sent = jnp.where(filled[:, :, None], experts[order], -1)
        return _join(hidden[order], sent, weights[order]), (wanted, slots)

    def dispatch(self, message):
        return jax.lax.all_to_all(message, self.axis, 0, 0)

    def unpack(self, received):
        hidden, experts, weights = _part(received.reshape(-1, received.shape[-1]), self.top_k)
        return hidden, _local(experts, self.axis, self.experts_per_device), weights

    def pack_results(self, results):
        return results.reshape(self.num_devices, -1, results.shape[-1])

    def combine(self, message):
        return jax.lax.all_to_all(message, self.axis, 0, 0)

    def unpack_results(self, returned, slots):
        wanted, slot = slots
        device = jnp.arange(self.num_devices)
        picked = returned[device, jnp.maximum(slot, 0)]  # [T, R, D]
        return jnp.where(wanted[:, :, None], picked, jnp.zeros_like(picked)).sum(1)


# Expert ids travel as two digits in the dtype of the hidden state: bfloat16 holds integers exactly
# up to 256. That keeps the message one differentiable array of one dtype.
_DIGIT = 256


def _join(hidden: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """[..., D], [..., K], [..., K] -> [..., D + 3K]."""
    shifted = experts + 1  # 0: no expert
    digits = [shifted // _DIGIT, shifted % _DIGIT]
    parts = [hidden, weights.astype(hidden.dtype), *(d.astype(hidden.dtype) for d in digits)]
    return jnp.concatenate(parts, axis=-1)


def _part(message: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inverse of `_join` for K = `top_k`."""
    width = message.shape[-1] - 3 * top_k
    borders = [width, width + top_k, width + 2 * top_k]
    hidden, weights, high, low = jnp.split(message, borders, axis=-1)
    digits = (jax.lax.stop_gradient(d).astype(jnp.int32) for d in (high, low))
    experts = next(digits) * _DIGIT + next(digits) - 1
    return hidden, experts, weights


def _local(experts: jax.Array, axis: str, experts_per_device: int) -> jax.Array:
    """Global expert ids -> index among this device's experts; outside [0, E) when not here."""
    first = jax.lax.axis_index(axis) * experts_per_device
    return jnp.where(experts < 0, -1, experts - first)

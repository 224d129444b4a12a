"""Expert exchange: tokens travel to the devices of their experts, and sums travel back.

One interface, several transports, equal in result. An exchange is used in three computes with two
communications between them, which is what a schedule can overlap:

    message, slots = pack(...)         in the stage that routes
    received = dispatch(message)       communication
    rows = unpack(received)            in the stage of the experts
    returned = combine(pack_results(..., received))   communication
    unpack_results(returned, slots)    at the head of the next stage

A token is sent to a device once, however many of its experts live there, and nothing is dropped
whatever the routing. Hidden state, weights and expert ids travel in one message: a second, small
collective for the ids took the place beside the large matrix product, and the payload then ran
exposed (measured on the schedule for 8x H100).

| transport | a device sends | |
|---|---|---|
| `all_to_all` | T rows to every device, the unused ones empty | every platform |
| `all_gather` | all rows to every device | every platform; for many experts a token |
| `ragged_all_to_all` | the rows that are routed | GPU and TPU; emulated, slowly, on CPU |
| `two_level` | T rows to every node, and what a node got to all its devices | several nodes |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp

from tbo_jax.moe.message import (
    DISPATCH_DTYPES,
    DispatchDtype,
    MessageFormat,
    Placement,
    local_experts,
    rows_at,
    sum_returned,
    take,
)
from tbo_jax.moe.ragged_exchange import RaggedAllToAll
from tbo_jax.moe.two_level_exchange import TwoLevel

Transport = Literal["all_to_all", "all_gather", "ragged_all_to_all", "two_level"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


class Exchange(Protocol):
    """What the mixture-of-experts block asks of a transport. T tokens, K experts each, D hidden."""

    def pack(self, hidden, experts, weights) -> tuple[Any, Any]:
        """[T, D], [T, K] int32 global ids (negative: no expert), [T, K] -> message, slots."""

    def dispatch(self, message: Any) -> Any:
        """The first communication."""

    def unpack(self, received: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """received -> rows [M, D], ids among this device's experts [M, K], weights [M, K]."""

    def pack_results(self, results: jax.Array, received: Any) -> Any:
        """[M, D], and what `dispatch` gave -> message."""

    def combine(self, message: Any) -> Any:
        """The second communication."""

    def unpack_results(self, returned: Any, slots: Any) -> jax.Array:
        """returned, slots -> [T, D]."""

    def link_bytes(self, tokens: int, hidden_size: int, dtype: Any) -> int:
        """Bytes that a device sends to others for T = `tokens`, both ways; at most, if ragged."""


def make_exchange(
    transport: Transport,
    *,
    axis: str | tuple[str, ...],
    num_devices: int,
    num_nodes: int = 1,
    num_experts: int,
    top_k: int,
    dispatch_dtype: DispatchDtype | None = None,
    dtype: Any = None,
    platform: str = "cpu",
) -> Exchange:
    """The exchange of `num_experts` experts, `top_k` a token, sharded over mesh axes.

    Args:
        transport: see the table of this module.
        axis: of the mesh, or several, of `num_devices` devices together.
        num_devices, num_experts, top_k: R, E and K.
        num_nodes: size of the first axis, for the transport that tells nodes apart.
        dispatch_dtype: round the hidden state on its way to the experts to 8 bits, with a scale
            for each token (`MessageFormat` tells the error). Not differentiable.
        dtype: of the hidden state; needed with `dispatch_dtype`.
        platform: of the devices.

    Raises:
        ValueError: unknown transport or `dispatch_dtype`, the experts do not divide over the
            devices, `dtype` is missing, or there are no axes of nodes and of devices in one.
    """
    if transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise ValueError(f"unknown transport {transport!r}: expected one of {known}")
    if dispatch_dtype is not None and dispatch_dtype not in DISPATCH_DTYPES:
        known = ", ".join(DISPATCH_DTYPES)
        raise ValueError(f"unknown dispatch_dtype {dispatch_dtype!r}: expected None, {known}")
    if dispatch_dtype is not None and dtype is None:
        raise ValueError("dispatch_dtype needs the dtype of the hidden state: give dtype")
    check_divisible(num_experts, num_devices)
    if num_devices == 1:
        return LocalExchange()
    form = MessageFormat(top_k, dispatch_dtype, dtype)
    if transport == "two_level":
        if isinstance(axis, str) or len(axis) < 2:
            raise ValueError(
                f"transport 'two_level' needs an axis of nodes and one of their devices, got {axis}"
            )
        experts, on_gpu = num_experts // num_devices, platform in ("gpu", "cuda")
        return TwoLevel(axis, num_nodes, num_devices, experts, form, own_stream=on_gpu)
    makers: dict[Transport, Callable[..., Exchange]] = {
        "all_to_all": PaddedAllToAll,
        "all_gather": AllGather,
        "ragged_all_to_all": RaggedAllToAll,
    }
    return makers[transport](axis, num_devices, num_experts // num_devices, form)


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

    def pack_results(self, results, received):
        return results

    def combine(self, message):
        return message

    def unpack_results(self, returned, slots):
        return returned

    def link_bytes(self, tokens, hidden_size, dtype):
        return 0


@dataclass(frozen=True)
class AllGather:
    """Every token to every device by all-gather; the partial sums back by reduce-scatter."""

    axis: str | tuple[str, ...]
    num_devices: int
    experts_per_device: int
    form: MessageFormat

    def pack(self, hidden, experts, weights):
        return self.form.join(hidden, experts, weights), None

    def dispatch(self, message):
        return jax.lax.all_gather(message, self.axis, tiled=True)

    def unpack(self, received):
        hidden, experts, weights = self.form.part(received)
        return hidden, local_experts(experts, self.axis, self.experts_per_device), weights

    def pack_results(self, results, received):
        return results

    def combine(self, message):
        return jax.lax.psum_scatter(message, self.axis, tiled=True)

    def unpack_results(self, returned, slots):
        return returned

    def link_bytes(self, tokens, hidden_size, dtype):
        row = self.form.row_bytes(hidden_size, dtype) + hidden_size * jnp.dtype(dtype).itemsize
        return (self.num_devices - 1) * tokens * row


@dataclass(frozen=True)
class PaddedAllToAll:
    """Each device's tokens packed per destination, in blocks of T rows, by `all_to_all`.

    T rows hold all tokens of a device, so that no routing overflows them.
    """

    axis: str | tuple[str, ...]
    num_devices: int
    experts_per_device: int
    form: MessageFormat

    def pack(self, hidden, experts, weights):
        tokens, devices = hidden.shape[0], self.num_devices
        start = tokens * jnp.arange(devices, dtype=jnp.int32)
        placement = Placement.of(experts, devices, self.experts_per_device)
        places = placement.places(start, devices * tokens)
        index = rows_at(places, devices * tokens).reshape(devices, tokens)
        rows = take(hidden, index), take(experts, index, -1), take(weights, index)
        return self.form.join(*rows), places

    def dispatch(self, message):
        return jax.lax.all_to_all(message, self.axis, 0, 0)

    def unpack(self, received):
        hidden, experts, weights = self.form.part(received.reshape(-1, received.shape[-1]))
        return hidden, local_experts(experts, self.axis, self.experts_per_device), weights

    def pack_results(self, results, received):
        return results.reshape(self.num_devices, -1, results.shape[-1])

    def combine(self, message):
        return jax.lax.all_to_all(message, self.axis, 0, 0)

    def unpack_results(self, returned, slots):
        return sum_returned(returned.reshape(-1, returned.shape[-1]), slots)

    def link_bytes(self, tokens, hidden_size, dtype):
        row = self.form.row_bytes(hidden_size, dtype) + hidden_size * jnp.dtype(dtype).itemsize
        return (self.num_devices - 1) * tokens * row

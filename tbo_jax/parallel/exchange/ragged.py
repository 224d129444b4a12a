"""Expert exchange by `ragged_all_to_all`: a device sends each other one the tokens routed there.

What arrives from device r stands in rows r * T to (r + 1) * T, so that no routing overflows them
and a sender knows where to write without asking. How much arrives, and where it is to go back to,
has to be told first: 8 bytes for each device, in an all-to-all of their own.

They are told in the compute that routes, not in the communication after it: the other micro-batch's
compute starts when they have arrived, and all of it runs beside the payload. They travel beside the
packing of the payload. (Modelled for 8x H100: told in the communication, they had the whole of the
other's compute to themselves, and the payload waited for its end. By all-gather, XLA:GPU joined
those of both micro-batches to one, and the first waited for the second.)

One collective is on its way at a time (`compiler_options` says why). So the sizes of a micro-batch
wait for the message of the other one, or XLA:GPU would start that message after them, at the end of
the compute that was to hide it: 64 % of the communication of a prefill step of Qwen3-30B-A3B was
hidden without that order and 94 % with it, modelled for 8 H100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.parallel.exchange.base import ShardedExchange
from tbo_jax.parallel.exchange.message import (
    Placement,
    rows_at,
    sum_returned,
    take,
)


@dataclass(frozen=True)
class RaggedAllToAll(ShardedExchange):
    """Each device's tokens packed per destination one after another; see `base.Exchange`.

    A message goes with its sizes: how many rows this device sends to each, [R] int32, and of what
    each sends to this one, how many rows and the first of them in the sender's message, [R, 2].
    """

    sizes_are_data = True

    def pack(self, hidden, experts, weights, arrived=None):
        placement = self.placement(experts)
        (told,) = self.tell([placement], arrived)
        return self.packed(hidden, experts, weights, placement, told)

    def placement(self, experts: jax.Array) -> Placement:
        """Which tokens go where, of global ids [T, K]."""
        return Placement.of(experts, self.num_devices, self.experts_per_device)

    def tell(self, placements: Sequence[Placement], arrived: Any) -> list[jax.Array]:
        """Tell all devices the sizes of some messages, and hear theirs: [R, 2] of each message."""
        sizes = jnp.stack([jnp.stack([p.count, _before(p.count)], 1) for p in placements], 1)
        if arrived is not None:  # stopped: there is no gradient of an order
            sizes, _ = jax.lax.optimization_barrier((sizes, jax.lax.stop_gradient(arrived)))
        told = jax.lax.all_to_all(sizes, self.axis, 0, 0)
        return [told[:, number] for number in range(len(placements))]

    def packed(self, hidden, experts, weights, placement: Placement, told: jax.Array):
        """The message, and the places of its rows, once its sizes are told."""
        rows = hidden.shape[0] * min(self.num_devices, self.form.top_k)
        places = placement.places(_before(placement.count), rows)
        index = rows_at(places, rows)
        packed = take(hidden, index), take(experts, index, -1), take(weights, index)
        return (self.form.join(*packed), placement.count, told), places

    def dispatch(self, message):
        payload, count, told = message
        tokens = payload.shape[0] // min(self.num_devices, self.form.top_k)
        first = tokens * jax.lax.axis_index(self.axis)
        received = send_rows(
            payload,
            self.num_devices * tokens,
            input_offsets=_before(count),
            send_sizes=count,
            output_offsets=jnp.full(self.num_devices, first, jnp.int32),
            recv_sizes=told[:, 0],
            axis=self.axis,
        )
        return received, count, told

    def unpack(self, received):
        message, _, told = received
        hidden, experts, weights = self.form.part(message)
        row = jnp.arange(message.shape[0] // self.num_devices, dtype=jnp.int32)
        arrived = (row < told[:, :1]).reshape(-1, 1)
        experts = jnp.where(arrived, experts, -1)
        return hidden, self.local(experts), weights

    def pack_results(self, results, received):
        return results, *received[1:]

    def combine(self, message):
        results, count, told = message
        tokens = results.shape[0] // self.num_devices
        return send_rows(
            results,
            tokens * min(self.num_devices, self.form.top_k),
            input_offsets=tokens * jnp.arange(self.num_devices, dtype=jnp.int32),
            send_sizes=told[:, 0],
            output_offsets=told[:, 1],
            recv_sizes=count,
            axis=self.axis,
        )

    def unpack_results(self, returned, places):
        return sum_returned(returned, places)

    def link_bytes(self, tokens, hidden_size, dtype):
        row = self.form.round_trip_bytes(hidden_size, dtype)
        told = 2 * 4 * (self.num_devices - 1)
        return min(self.num_devices - 1, self.form.top_k) * tokens * row + told


def expected_destinations(num_devices: int, num_experts: int, top_k: int, chunks: int = 1) -> float:
    """To how many *other* devices a token goes, if its K experts are drawn evenly of all E.

    In one of several chunks, where it goes to those of one group of their experts only.
    """
    here = num_experts / num_devices / chunks  # not whole where groups differ in size
    sizes = math.floor(here), math.ceil(here)
    share = here - sizes[0]
    elsewhere = sum(
        part * math.comb(num_experts - size, top_k) / math.comb(num_experts, top_k)
        for part, size in zip((1 - share, share), sizes, strict=True)
    )
    return (num_devices - 1) * (1 - elsewhere)


def send_rows(
    operand: jax.Array,
    rows: int,
    *,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    axis: str | tuple[str, ...],
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` into `rows` new rows, on every platform.

    XLA:CPU has none (jax 0.12): there all rows go to all devices, and each picks its own.

    Args:
        operand: [N, W].
        rows: M, of the result.
        input_offsets, send_sizes: [R] int32, the rows of `operand` for each device.
        output_offsets: [R] int32, where they go in the result of that device.
        recv_sizes: [R] int32, how many come from each device.
        axis: of the mesh, of R devices.

    Returns:
        [M, W]; what nothing was written to is undefined.
    """

    def native(operand, input_offsets, send_sizes, output_offsets, recv_sizes):
        # Not zeros: XLA fills those of all layers at once, before the first, and keeps them all.
        out = jax.lax.empty((rows, operand.shape[1]), operand.dtype)
        sizes = input_offsets, send_sizes, output_offsets, recv_sizes
        return jax.lax.ragged_all_to_all(operand, out, *sizes, axis_name=axis)

    def emulated(operand, input_offsets, send_sizes, output_offsets, _):
        where = jnp.stack([input_offsets, send_sizes, output_offsets])
        return _send_rows_emulated(operand, rows, where, axis)

    where = input_offsets, send_sizes, output_offsets, recv_sizes
    return jax.lax.platform_dependent(operand, *where, cpu=emulated, default=native)


def _send_rows_emulated(operand, rows, where, axis):
    """`where` [3, R]: input offsets, sizes and output offsets, of this sender."""
    me = jax.lax.axis_index(axis)
    source, size, target = jax.lax.all_gather(where, axis)[:, :, me].T  # [R] each, of the senders
    within = jnp.arange(rows, dtype=jnp.int32)[:, None] - target  # [M, R]
    sent = (within >= 0) & (within < size)
    everything = jax.lax.all_gather(operand, axis, tiled=True)  # [R * N, W]
    first = operand.shape[0] * jnp.arange(size.shape[0], dtype=jnp.int32) + source
    index = jnp.where(sent, first + within, 0).sum(1)
    # What is undefined is a NaN here, so that whoever reads it shows.
    undefined = jnp.nan if jnp.issubdtype(operand.dtype, jnp.floating) else 255
    return take(everything, jnp.where(sent.any(1), index, everything.shape[0]), undefined)


def _before(count: jax.Array) -> jax.Array:
    """The sum of what stands before each."""
    return jnp.cumsum(count, dtype=jnp.int32) - count

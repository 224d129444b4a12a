"""Expert exchange by `all_to_all`, in blocks that hold a device's tokens whatever the routing."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tbo_jax.parallel.exchange.base import ShardedExchange
from tbo_jax.parallel.exchange.message import Placement, rows_at, sum_returned, take


@dataclass(frozen=True)
class PaddedAllToAll(ShardedExchange):
    """Each device's tokens packed per destination, in blocks of T rows, by `all_to_all`.

    T rows hold all tokens of a device, so that no routing overflows them.
    """

    def pack(self, hidden, experts, weights, arrived=None):
        tokens, devices = hidden.shape[0], self.num_devices
        start = tokens * jnp.arange(devices, dtype=jnp.int32)
        placement = Placement.of(experts, devices, self.experts_per_device)
        places = placement.places(start, devices * tokens)
        index = rows_at(places, devices * tokens).reshape(devices, tokens)
        rows = take(hidden, index), take(experts, index, -1), take(weights, index)
        return self.form.join(*rows), places

    def dispatch(self, message):
        return jax.lax.all_to_all(message, self.axis, 0, 0)

    def pack_results(self, results, received):
        return results.reshape(self.num_devices, -1, results.shape[-1])

    def combine(self, message):
        return jax.lax.all_to_all(message, self.axis, 0, 0)

    def unpack_results(self, returned, places):
        return sum_returned(returned.reshape(-1, returned.shape[-1]), places)

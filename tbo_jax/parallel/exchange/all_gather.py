"""Expert exchange by `all_gather`: every device gets all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from tbo_jax.parallel.exchange.base import ShardedExchange


@dataclass(frozen=True)
class AllGather(ShardedExchange):
    """Every token to every device by all-gather; the partial sums back by reduce-scatter."""

    @property
    def destinations(self):
        return 1

    def pack(self, hidden, experts, weights, arrived=None):
        return self.form.join(hidden, experts, weights), None

    def dispatch(self, message):
        return jax.lax.all_gather(message, self.axis, tiled=True)

    def pack_results(self, results, received):
        return results

    def combine(self, message):
        return jax.lax.psum_scatter(message, self.axis, tiled=True)

    def unpack_results(self, returned, places):
        return returned

"""Expert exchange by `all_gather`: every device gets all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tbo_jax.parallel.exchange.base import Exchange, ExchangeSpec
from tbo_jax.parallel.exchange.message import MessageFormat, local_experts


@dataclass(frozen=True)
class AllGather(Exchange):
    """Every token to every device by all-gather; the partial sums back by reduce-scatter."""

    axis: str | tuple[str, ...]
    num_devices: int
    experts_per_device: int
    form: MessageFormat

    @classmethod
    def make(cls, spec: ExchangeSpec):
        return cls(spec.axis, spec.num_devices, spec.experts_per_device, spec.form)

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

    def unpack_results(self, returned, places):
        return returned

    def link_bytes(self, tokens, hidden_size, dtype):
        row = self.form.row_bytes(hidden_size, dtype) + hidden_size * jnp.dtype(dtype).itemsize
        return (self.num_devices - 1) * tokens * row

"""Tensor parallelism: a rank's attention and feed-forward shared by several devices.

As in Megatron-LM (Shoeybi et al. 2019) each device has some of the heads and of the features, and
their partial sums are added up between blocks. Before experts the sum leaves each device its part
of the tokens (Korthikanti et al. 2022), so that a token is routed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tbo_jax.parallel.sharding import TENSOR


@dataclass(frozen=True)
class TensorParallel:
    """`size` devices share a rank; T tokens, of which each has the part P = ceil(T / size)."""

    size: int = 1

    def reduce(self, partial: jax.Array) -> jax.Array:
        """The sum over the devices, on each."""
        return partial if self.size == 1 else jax.lax.psum(partial, TENSOR)

    def scatter(self, partial: jax.Array) -> jax.Array:
        """[T, D] -> [P, D]: this device's part of the sum over the devices."""
        if self.size == 1:
            return partial
        return jax.lax.psum_scatter(self._padded(partial), TENSOR, tiled=True)

    def gather(self, part: jax.Array, tokens: int) -> jax.Array:
        """[P, D] -> [T, D]: the parts of all devices."""
        if self.size == 1:
            return part
        return jax.lax.all_gather(part, TENSOR, tiled=True)[:tokens]

    def part(self, whole: jax.Array) -> jax.Array:
        """[T, ...] -> [P, ...]: this device's part; behind the last token zeros."""
        if self.size == 1:
            return whole
        padded = self._padded(whole)
        count = padded.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR) * count, count)

    def own_head(self, heads: jax.Array) -> jax.Array:
        """[T, G, H] -> [T, 1, H] where there are fewer key/value heads than devices."""
        if self.size == 1:
            return heads
        own = jax.lax.axis_index(TENSOR) * heads.shape[1] // self.size
        return jax.lax.dynamic_slice_in_dim(heads, own, 1, axis=1)

    def _padded(self, x: jax.Array) -> jax.Array:
        missing = -x.shape[0] % self.size
        return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x


ONE_DEVICE = TensorParallel()

"""The weights of the experts of a layer, also as a part of those of all layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Self

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gate_up", "down", "first"],
    meta_fields=["count"],
)
@dataclass(frozen=True)
class ExpertWeights:
    """Gated (SwiGLU) experts of one layer on one device: E of the G that the arrays hold.

    Scanned layers keep their weights stacked. XLA:GPU writes out each slice of a stack before a
    kernel reads it, in every step (100 MB a layer for Qwen3-30B-A3B on 8 devices); so kernels take
    the whole stack, and where the layer's experts begin in it.
    """

    gate_up: jax.Array  # [G, D, 2F], gate projection first
    down: jax.Array  # [G, F, D]
    first: jax.Array | None = None  # [] int32, where the layer's experts begin; None: 0
    count: int | None = None  # E; None: G

    @classmethod
    def of_layer(cls, gate_up: jax.Array, down: jax.Array, layer: jax.Array) -> Self:
        """Those of one layer, [], out of stacks [L, E, D, 2F] and [L, E, F, D], in place."""
        count = gate_up.shape[1]
        flat = (stack.reshape(-1, *stack.shape[2:]) for stack in (gate_up, down))
        return cls(*flat, layer * count, count)

    @property
    def num_experts(self) -> int:
        """E, experts of this layer on this device."""
        return self.gate_up.shape[0] if self.count is None else self.count

    def place(self, expert: jax.Array) -> jax.Array:
        """Where experts of this layer, from 0 to E - 1, stand in the arrays."""
        return expert if self.first is None else self.first + expert

    def sliced(self) -> Self:
        """The same experts in arrays of their own."""
        if self.first is None:
            return self

        def cut(stack: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(stack, self.first, self.num_experts)

        return replace(self, gate_up=cut(self.gate_up), down=cut(self.down), first=None)

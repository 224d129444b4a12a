"""The weights of the experts of a layer, also as a part of those of all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax

from tbo_jax.moe.activation import SwiGlu
from tbo_jax.quantized.array import QuantizedArray

_ARRAYS = "gate_up", "down", "gate_up_bias", "down_bias"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*_ARRAYS, "first"],
    meta_fields=["activation", "count"],
)
@dataclass(frozen=True)
class ExpertWeights:
    """Gated experts of one layer on one device: E of the G that the arrays hold.

    Expert e is `activation(x @ gate + its bias, x @ up + its bias) @ down + its bias`.

    Scanned layers keep their weights stacked. XLA:GPU writes out each slice of a stack before a
    kernel reads it, in every step (100 MB a layer for Qwen3-30B-A3B on 8 devices); so kernels take
    the whole stack, and where the layer's experts begin in it.
    """

    gate_up: jax.Array | QuantizedArray  # [G, D, 2F], gate projection first
    down: jax.Array | QuantizedArray  # [G, F, D]
    gate_up_bias: jax.Array | None = None  # [G, 2F]
    down_bias: jax.Array | None = None  # [G, D]
    activation: SwiGlu = SwiGlu()  # noqa: RUF009, frozen
    first: jax.Array | None = None  # [] int32, where the layer's experts begin; None: 0
    count: int | None = None  # E; None: G

    def of_layer(self, layer: jax.Array) -> Self:
        """Those of one layer, [], where the arrays are stacks [L, E, ...], in place."""
        count = self.gate_up.shape[1]
        flat = self._each(lambda stack: stack.reshape(-1, *stack.shape[2:]))
        return replace(flat, first=layer * count, count=count)

    @property
    def num_experts(self) -> int:
        """E, experts of this layer on this device."""
        return self.gate_up.shape[0] if self.count is None else self.count

    def place(self, expert: jax.Array) -> jax.Array:
        """Where experts of this layer, from 0 to E - 1, stand in the arrays."""
        return expert if self.first is None else self.first + expert

    def sliced(self) -> Self:
        """The same experts in arrays of their own."""
        first = self.first
        if first is None:
            return self
        own = self._each(lambda a: jax.lax.dynamic_slice_in_dim(a, first, self.num_experts))
        return replace(own, first=None)

    def _each(self, change: Callable[[jax.Array], jax.Array]) -> Self:
        changed: dict[str, Any] = {
            name: jax.tree.map(change, getattr(self, name)) for name in _ARRAYS
        }
        return replace(self, **changed)

"""The paged key/value cache as layers see it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's view of the cache.

    The heads share an axis: with an axis of their own XLA:TPU wants another layout for reading than
    for writing, and copied the whole cache in every layer (libtpu 0.0.52, v5e).
    """

    keys: jax.Array  # [pages, S, G * H]: S tokens a page, G key/value heads, H head size
    values: jax.Array  # [pages, S, G * H]
    first_page: Any = 0  # int or traced []: where this layer's pages begin in a stacked array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """Pages of all layers: an array per layer, or one array that holds the pages of all of them.

    The stacked form is for scanned layers. Layer l's page p is then row `l * pages_per_layer + p`,
    so that a loop carries one array and updates it in place; as scanned inputs and outputs it would
    be copied whole in every step although the alias is declared.
    """

    keys: tuple[jax.Array, ...]  # L x [N, S, G * H], or 1 x [L * N, S, G * H]
    values: tuple[jax.Array, ...]
    num_layers: int = dataclasses.field(metadata={"static": True})

    @property
    def stacked(self) -> bool:
        """Whether one array holds the pages of all layers."""
        return len(self.keys) == 1 and self.num_layers > 1

    def layer(self, index: Any, after: Any = None) -> LayerCache:
        """The view of layer `index`, to be used when the arrays in `after` have been computed.

        `index` may be traced in the stacked form. A micro-batch writes pages that an earlier one
        has read. XLA must know that the read comes first, or it copies the cache: XLA:CPU (0.10)
        removes optimization barriers before it decides on copies, so the order is in the data.
        """
        wait = 0 if after is None else _zero_after(after)
        if self.stacked:
            per_layer = self.keys[0].shape[0] // self.num_layers
            return LayerCache(self.keys[0], self.values[0], index * per_layer + wait)
        return LayerCache(self.keys[index], self.values[index], wait)

    def with_layer(self, index: Any, view: LayerCache) -> KeyValueCache:
        """The cache in which layer `index` has the arrays of `view`."""
        at = 0 if self.stacked else index
        keys = (*self.keys[:at], view.keys, *self.keys[at + 1 :])
        values = (*self.values[:at], view.values, *self.values[at + 1 :])
        return dataclasses.replace(self, keys=keys, values=values)


def _zero_after(tree: Any) -> jax.Array:
    """A zero, int32 [], that depends on every array of `tree` without XLA knowing its value."""
    bits = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves(tree):
        element = jax.lax.stop_gradient(leaf).reshape(-1)[0]
        if jnp.issubdtype(element.dtype, jnp.floating):
            width = jnp.dtype(element.dtype).itemsize * 8
            element = jax.lax.bitcast_convert_type(element, f"int{width}")
        bits |= element.astype(jnp.int32)
    return (bits & 1) >> 1

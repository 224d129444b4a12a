"""Equal layers as one module, to be run in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class StackedLayers(nnx.Module):
    """Equal layers as one module whose leaves have a leading axis [L, ...]; `run_layers` scans it.

    Indexing, also with a traced index, gives one layer. Weights are indexed inside the loop body:
    handed in as scanned inputs, the slices for a peeled first layer cost a copy of all weights. A
    layer with a method `share_stack(stacked, index)` may there replace slices by the stack itself,
    for kernels that read it in place.
    """

    def __init__(self, stacked: nnx.Module, length: int):
        self.stacked = stacked
        self.length = length

    @classmethod
    def stack(cls, layers: Sequence[nnx.Module]) -> StackedLayers:
        """Stack equal layers.

        Raises:
            ValueError: the layers differ in structure or shape, so one loop body cannot run them.
        """
        structures = {str(jax.tree.structure(layer)) for layer in layers}
        if len(structures) != 1:
            raise ValueError(
                f"{len(layers)} layers of {len(structures)} kinds cannot be scanned: "
                "run them unrolled"
            )
        kinds = {tuple(leaf.dtype for leaf in jax.tree.leaves(layer)) for layer in layers}
        if len(kinds) != 1:
            raise ValueError("layers of different dtype cannot be scanned: run them unrolled")
        return cls(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), len(layers))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        layer = jax.tree.map(lambda leaf: leaf[index], self.stacked)
        if hasattr(layer, "share_stack"):
            layer.share_stack(self.stacked, index)
        return layer

"""Equal layers as one module, to be run in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tbo_jax.overlap.written import Path, contents, find, full_name, take_apart, write


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
            TypeError: one of them is no Flax module.
            ValueError: there are none, or they differ in class, attributes, shape or dtype, so that
                one loop body cannot run them.
        """
        if not len(layers):
            raise ValueError("StackedLayers.stack needs at least one layer, got 0")
        for number, layer in enumerate(layers):
            if not isinstance(layer, nnx.Module):
                kind = layer if isinstance(layer, type) else type(layer)
                what = "the class " if isinstance(layer, type) else "of type "
                raise TypeError(
                    f"StackedLayers.stack: layers[{number}] is {what}{kind.__name__}: expected an "
                    "instance of an nnx.Module"
                )
            difference = _difference(layers[0], layer)
            if difference:
                raise ValueError(
                    f"layers[0] and layers[{number}] cannot be scanned, they differ in "
                    f"{difference}: run them unrolled"
                )
        return cls(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), len(layers))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and not -self.length <= index < self.length:
            raise IndexError(f"layer {index} of {self.length}")
        layer = jax.tree.map(lambda leaf: leaf[index], self.stacked)
        if hasattr(layer, "share_stack"):
            layer.share_stack(self.stacked, index)
        return layer

    def write(self, index: Any, path: Path, value: Any) -> None:
        """Write into a variable of layer `index`.

        Raises:
            TypeError: there is no such variable, or its content has another structure.
        """
        variable = find(self.stacked, path)
        name = full_name(self.stacked, path)
        if not isinstance(variable, nnx.Variable):
            raise TypeError(
                f"{name} is made or set in a stage of scanned layers: expected an nnx.Variable "
                "that each layer has from the start, or layers that run unrolled"
            )
        stack = variable.get_raw_value()

        def kinds(tree: Any, cut: int) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            return structure, [_shape_and_dtype(leaf, cut) for leaf in leaves]

        if kinds(value, 0) != kinds(stack, 1):
            raise TypeError(
                f"{name} is set to another structure, shape or dtype in a stage of scanned layers: "
                "expected that which it had"
            )
        variable.set_raw_value(jax.tree.map(lambda s, v: s.at[index].set(v), stack, value))

    def contents(self, paths: Sequence[Path]) -> list[Any]:
        """What these variables hold, for all layers."""
        return [find(self.stacked, path).get_raw_value() for path in paths]

    def with_contents(self, paths: Sequence[Path], values: Sequence[Any]) -> StackedLayers:
        """A copy in which these variables hold something else."""
        arrays, copy = take_apart(self)
        (copied,) = copy(arrays)
        for path, value in zip(paths, values, strict=True):
            write(copied.stacked, path, value)
        return copied


def _shape_and_dtype(leaf: Any, cut: int) -> Any:
    """Give both for an array or a number, less its first `cut` axes; give anything else back."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
        return leaf
    return jnp.shape(leaf)[cut:], jnp.result_type(leaf)


def _difference(one: Any, other: Any) -> str | None:
    """Where two layers differ so that one loop body cannot run them, or None."""
    if type(one) is not type(other):
        return f"class, {type(one).__name__} and {type(other).__name__}"
    left, right = contents(one), contents(other)
    alone = left.keys() ^ right.keys()
    if alone:
        return f"{full_name(one, min(alone, key=str))}, which one of them has not"
    for path, value in left.items():
        there = right[path]
        if isinstance(value, nnx.Pytree) or path == ():
            if type(value) is not type(there):
                kinds = f"{type(value).__name__} and {type(there).__name__}"
                return f"the class of {full_name(one, path)}, {kinds}"
            continue
        leaves = jax.tree.leaves((value, there))
        if not any(isinstance(leaf, jax.Array) for leaf in leaves):
            if value is not there and value != there:
                return f"{full_name(one, path)}, {value!r} and {there!r}"
            continue
        if not _same(value, there):
            return f"the structure of {full_name(one, path)}"
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(there), strict=True):
            if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
                return f"the shape or dtype of {full_name(one, path)}, {_kind(a)} and {_kind(b)}"
    if not _same(one, other):
        return f"static attributes of {type(one).__name__}"
    return None


def _same(one: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return structures[0] == structures[1]


def _kind(array: Any) -> str:
    return f"{jnp.result_type(array)}{list(jnp.shape(array))}"

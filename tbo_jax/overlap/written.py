"""What a layer writes while one of its stages runs: a dropout's count, batch statistics, `sow`.

A stage runs on a copy of its layer where the weights go through a barrier, where it is computed
anew in the backward pass, and in a loop. What it writes is found on the copy and written into the
layer itself, so that the next micro-batch sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

Path = tuple[str | int, ...]


def take_apart(*layers: Any) -> tuple[list[jax.Array | None], Callable[[list[Any]], list[Any]]]:
    """The arrays of the first layer, and what copies all layers with others in their place.

    None stands for what is no array of the first layer. A layer that JAX does not know as a pytree
    is no copy.
    """
    numbered = dict(enumerate(layers))
    modules: Any = {n: layer for n, layer in numbered.items() if isinstance(layer, nnx.Pytree)}
    others = {n: layer for n, layer in numbered.items() if n not in modules}
    graph, state = nnx.split(modules)  # as one graph, so that what layers share stays shared
    found, structure = jax.tree_util.tree_flatten_with_path((state, others))

    def copy(arrays: list[Any]) -> list[Any]:
        pairs = zip(arrays, found, strict=True)
        leaves = [leaf if array is None else array for array, (_, leaf) in pairs]
        state, others = jax.tree.unflatten(structure, leaves)
        copied = {**nnx.merge(graph, state), **others}
        return [copied[number] for number in numbered]

    def of_first(path: Any, leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and path[1].key == 0

    return [leaf if of_first(path, leaf) else None for path, leaf in found], copy


def contents(layer: Any) -> dict[Path, Any]:
    """What a layer holds, to be compared by identity."""
    return {path: _content(part) for path, part in _parts(layer)}


def changes(layer: Any, before: dict[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """What was written since: the content of a variable, or the new value of an attribute.

    Raises:
        TypeError: something was removed, or written into a layer that is no Flax module.
    """
    parts = dict(_parts(layer))
    gone = before.keys() - parts.keys()
    if gone:
        raise TypeError(
            f"{full_name(layer, min(gone, key=str))} was removed inside a stage: expected that a "
            "stage writes or adds"
        )
    made = parts.keys() - before.keys()
    for path, part in parts.items():
        if any(path[:end] in made for end in range(len(path))):
            continue  # a part of something new
        if path in made:
            yield path, part
        elif before[path] is not _content(part):
            if not isinstance(layer, nnx.Pytree):
                raise TypeError(
                    f"{full_name(layer, path)} was written inside a stage, where it would be lost: "
                    "expected an nnx.Module that keeps it in an nnx.Variable"
                )
            yield path, _content(part)


def write(layer: Any, path: Path, value: Any) -> None:
    """Write into a layer what `changes` found in a copy of it."""
    *parents, name = path
    node = layer
    for key in parents:
        node = _child(node, key)
    variable = _child(node, name)
    if isinstance(variable, nnx.Variable) and not isinstance(value, nnx.Variable):
        variable.set_raw_value(value)
    elif isinstance(node, nnx.Pytree) and isinstance(name, str):
        setattr(node, name, value)
    else:
        node[name] = value


def find(layer: Any, path: Path) -> Any:
    """What stands there, or None."""
    for key in path:
        layer = _child(layer, key)
    return layer


def full_name(layer: Any, path: Path) -> str:
    """Such as `Block.drop.rngs.count`."""
    return ".".join([type(layer).__name__, *map(str, path)])


def _parts(layer: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(layer, nnx.Pytree):
        for keys, part in nnx.iter_graph(layer):
            path: Any = tuple(keys)
            if not any(str(key).startswith("_pytree__") for key in path):
                yield path, part
    else:
        for keys, leaf in jax.tree_util.tree_flatten_with_path(layer)[0]:
            yield tuple(jax.tree_util.keystr((key,), simple=True) for key in keys), leaf


def _content(part: Any) -> Any:
    return part.get_raw_value() if isinstance(part, nnx.Variable) else part


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, nnx.Pytree) and isinstance(key, str):
        return getattr(node, key, None)
    try:
        return node[key]
    except (KeyError, IndexError):
        return None

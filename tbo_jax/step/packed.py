"""A batch as two arrays: its tokens, and all other whole numbers in one.

A program takes a few microseconds for each array of the host and device that it is handed. A batch
has nine small ones.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.overlap.batch import ForwardBatch

ALONE = "token_ids"  # they may be on the device already, those of the step before


def pack_numbers(batch: ForwardBatch, shapes: ForwardBatch) -> tuple[Any, ForwardBatch]:
    """Take the whole numbers out of a batch of R ranks.

    Args:
        batch: leaves [R, ...]. Arrays of numpy are copied. Those of JAX stay on their devices,
            where a program joins them; it is compiled for each bucket.
        shapes: what they should be.

    Returns:
        [R, N] int32, and what is left of the batch: None where a field was taken.

    Raises:
        ValueError: a field has another shape or dtype.
    """
    taken: list[Any] = []
    rest: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value, shape = getattr(batch, field.name), getattr(shapes, field.name)
        if value is None:
            continue
        if value.shape != shape.shape or value.dtype != shape.dtype:
            raise ValueError(
                f"{field.name} must be {shape.dtype} {list(shape.shape)} in this bucket, got "
                f"{value.dtype} {list(value.shape)}"
            )
        if _is_taken(field.name, shape):
            taken.append(value)
            rest[field.name] = None
        elif isinstance(value, np.ndarray):
            rest[field.name] = value.copy()
    on_host = all(isinstance(value, np.ndarray) for value in taken)
    numbers = _joined(np, taken) if on_host else _joined_on_device(taken)
    return numbers, dataclasses.replace(batch, **rest)


def unpack_numbers(numbers: jax.Array, rest: ForwardBatch, shapes: ForwardBatch) -> ForwardBatch:
    """The batch of one rank: [N] and its other fields, without the axis of the ranks.

    `shapes` are those of all ranks, as `pack_numbers` takes them.
    """
    start, fields = 0, {}
    for field in dataclasses.fields(shapes):
        shape = getattr(shapes, field.name)
        if shape is not None and _is_taken(field.name, shape):
            axes = shape.shape[1:]
            stop = start + int(np.prod(axes))
            fields[field.name] = numbers[start:stop].reshape(axes)
            start = stop
    return dataclasses.replace(rest, **fields)


def _joined(of: Any, values: list[Any]) -> Any:
    return of.concatenate([value.reshape(value.shape[0], -1) for value in values], axis=1)


_joined_on_device = jax.jit(functools.partial(_joined, jnp))


def _is_taken(name: str, shape: Any) -> bool:
    return name != ALONE and shape.dtype == jnp.int32

"""Plain weights of a checkpoint, quantised while they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tbo_jax.checkpoint.encoding import Encoding, Index
from tbo_jax.checkpoint.quantized import PlainWeights
from tbo_jax.checkpoint.tensors import TensorFolder, assign
from tbo_jax.quantized.array import STORED_AS, Format

Quantize = Literal["stored", "none", "fp8", "int8"]
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
Target = Literal["fp8", "int8"]

LARGEST = {"fp8": 448.0, "int8": 127.0}
_AT_ONCE = 1 << 22  # numbers that are quantised together: 16 MiB in float32


@dataclass(frozen=True)
class QuantizingWeights(PlainWeights):
    """Plain weights, each output of which gets a factor, so that its largest number is `LARGEST`.

    A number is rounded to the nearest, to even where two are as near.
    """

    kind: Target

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        if len(shape) < 2:
            return None
        block = (1, shape[-1]) if inputs == -1 else (shape[-2], 1)
        values = _Quantizing(self.tensors, self.kind, inputs, factors=False)
        scales = _Quantizing(self.tensors, self.kind, inputs, factors=True)
        return Encoding(Format(self.kind, block), values, scales, np.dtype(np.float32))


@dataclass(frozen=True)
class _Quantizing:
    """The quantised numbers of a tensor with its inputs along axis `inputs`, or their factors."""

    tensors: TensorFolder
    kind: Target
    inputs: int
    factors: bool

    def read_into(
        self,
        name: str,
        out: NDArray[Any],
        index: Index | None = None,
        *,
        transpose: bool = False,
    ) -> None:
        shape = self.tensors.info(name).shape
        wanted = list(index or (slice(None),) * len(shape))
        target = np.swapaxes(out, -1, -2) if transpose else out
        axis, outputs = len(shape) + self.inputs, len(shape) - 3 - self.inputs
        if len(shape) > 2:  # a matrix at a time
            for number, entry in enumerate(range(*wanted[0].indices(shape[0]))):
                of_one = slice(entry, entry + 1), *wanted[1:]
                self._read_matrix(name, target[number : number + 1], of_one, axis, outputs)
        else:
            self._read_matrix(name, target, tuple(wanted), axis, outputs)

    def _read_matrix(
        self, name: str, target: NDArray[Any], index: Index, axis: int, outputs: int
    ) -> None:
        shape = self.tensors.info(name).shape
        start, stop, _ = index[outputs].indices(shape[outputs])
        step = max(1, _AT_ONCE // shape[axis])
        for first in range(start, stop, step):
            taken, place = list(index), [slice(None)] * len(shape)
            taken[outputs] = slice(first, min(first + step, stop))
            taken[axis] = slice(0, shape[axis])
            place[outputs] = slice(first - start, taken[outputs].stop - start)
            numbers = self.tensors.read(name, tuple(taken)).astype(np.float32)
            factors = find_factors(numbers, axis, self.kind)
            if self.factors:
                target[tuple(place)] = factors
                continue
            inner = [slice(None)] * len(shape)
            inner[axis] = index[axis]
            rounded = quantize(numbers[tuple(inner)], factors, self.kind)
            assign(target[tuple(place)], rounded, tiled=False)


def find_factors(numbers: NDArray[np.float32], axis: int, kind: Target) -> NDArray[np.float32]:
    """The factors of `numbers`, one for all along `axis`; of nothing but zeros it is 1."""
    largest = np.abs(numbers).max(axis=axis, keepdims=True, initial=0)
    return np.where(largest == 0, np.float32(1), largest / np.float32(LARGEST[kind]))


def quantize(
    numbers: NDArray[np.float32], factors: NDArray[np.float32], kind: Target
) -> NDArray[Any]:
    """`numbers` over their factors, rounded; what is not a number stays none in fp8."""
    scaled = numbers / factors
    if kind == "int8":
        # Integers have no NaN: its factor, which is one, makes every number of the output NaN.
        return np.rint(np.nan_to_num(scaled)).astype(np.int8)
    return scaled.astype(STORED_AS["fp8"])

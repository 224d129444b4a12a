"""Matrices in MXFP4 as compressed-tensors and ModelOpt write them, each alone.

Of a weight `NAME.weight` [out, in] there are `NAME.weight_packed` (ModelOpt: `NAME.weight`), bytes
[out, in / 2] with two e2m1 numbers in each, the first in the low half, and `NAME.weight_scale`,
bytes [out, in / 32], exponents as in `mxfp4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tbo_jax.checkpoint.encoding import Encoding, TensorOf
from tbo_jax.checkpoint.mxfp4 import BLOCK
from tbo_jax.checkpoint.quantized import EncodedWeights
from tbo_jax.checkpoint.scaled import OF_ACTIVATIONS, SCALE, WEIGHT, check_matrix
from tbo_jax.checkpoint.tensors import CheckpointError
from tbo_jax.quantized.array import Format


@dataclass(frozen=True)
class Mxfp4Matrices(EncodedWeights):
    """A `WeightFormat`: what has a `weight_scale` is quantised, the rest is plain."""

    numbers: str  # the end of the name of the tensor of numbers

    def passes_over(self, name: str) -> bool:
        return name.endswith(OF_ACTIVATIONS)

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        base = name.removesuffix(WEIGHT)
        check_matrix(self.tensors, name, shape)
        if not self._is_scaled(name):
            return {name: shape}
        rows, columns = shape
        for tensor in (base + self.numbers, base + SCALE):
            if tensor in self.tensors and (dtype := self.tensors.info(tensor).dtype) != np.uint8:
                raise CheckpointError(
                    f"{self.tensors.folder}: tensor {tensor} is {dtype}, expected uint8"
                )
        if columns % BLOCK:
            raise CheckpointError(
                f"{self.tensors.folder}: tensor {base}{SCALE} is there, but {name} of shape "
                f"{list(shape)} does not divide into blocks of {BLOCK}"
            )
        return {base + self.numbers: (rows, columns // 2), base + SCALE: (rows, columns // BLOCK)}

    def encoding(self, name: str, shape: tuple[int, ...], inputs: int) -> Encoding | None:
        if not self._is_scaled(name):
            return None
        values = TensorOf(self.tensors, self.numbers, WEIGHT)
        scales = TensorOf(self.tensors, SCALE, WEIGHT)
        return Encoding(Format("mxfp4", (1, BLOCK)), values, scales, np.dtype(np.uint8))

    def held_shape(self, name: str) -> tuple[int, ...] | None:
        if not self._is_scaled(name):
            return None
        rows, half = self.tensors.info(name.removesuffix(WEIGHT) + self.numbers).shape
        return rows, 2 * half

    def _is_scaled(self, name: str) -> bool:
        return name.endswith(WEIGHT) and name.removesuffix(WEIGHT) + SCALE in self.tensors

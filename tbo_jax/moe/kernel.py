"""What a kernel for experts is: an object that knows its limits and its cost.

A kernel is made for a shape. Adding one takes a file with a subclass of `ExpertKernel` here, and a
line in the table of `step/kernels.py`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from tbo_jax.moe.expert_weights import ExpertWeights


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer."""

    hidden: int  # D, elements of a row
    inner: int  # F, elements between the two products
    dtype: Any
    weight_bits: float | None = None  # of a number of the weights, as held; None: those of `dtype`

    @property
    def weight_bytes(self) -> float:
        """Bytes of a number of the weights."""
        bits = self.weight_bits
        return jnp.dtype(self.dtype).itemsize if bits is None else bits / 8


@dataclass(frozen=True)
class ExpertLoad:
    """What a micro-batch asks of the experts of a device, for the schedule report."""

    rows: int  # M, received
    top_k: int  # K, choices of a row
    chosen: float  # choices that are really of this device
    num_experts: int  # E of this device

    @property
    def bound(self) -> int:
        """The most choices that can be of this device."""
        return self.rows * min(self.top_k, self.num_experts)


@dataclass(frozen=True)
class ExpertKernel(abc.ABC):
    """The gated experts of a device, applied to the rows that reached it, for one shape."""

    shape: ExpertShape

    @classmethod
    @abc.abstractmethod
    def unsupported(cls, shape: ExpertShape, device: Any = None) -> str | None:
        """Why the kernel cannot run this shape on devices like `device`; None if it can."""

    @classmethod
    def for_device(cls, shape: ExpertShape, device: Any = None) -> Self:
        """The kernel as it runs best on devices like `device`."""
        return cls(shape)

    @abc.abstractmethod
    def __call__(
        self, rows: jax.Array, experts: jax.Array, weights: jax.Array, matrices: ExpertWeights
    ) -> jax.Array:
        """Weighted sum, for each row, of the experts of this device that it chose.

        Takes and gives what `experts.apply_experts` does.
        """

    def expected_turns(self, load: ExpertLoad) -> dict[str, float]:
        """Turns of the loops whose number is data, by their name scopes, for even routing."""
        return {}

    def expected_work(self, load: ExpertLoad) -> dict[str, tuple[float, float]]:
        """Floating-point operations and bytes, by the name that XLA's text has for each kernel.

        Of one turn of a loop that is in `expected_turns`. Empty for what XLA computes, whose text
        tells them.
        """
        return {}

    @property
    def _width(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.shape.dtype).itemsize

"""How a checkpoint of Hugging Face stores a parameter: metadata of the parameter, as `Shard` is.

A parameter without such metadata is one tensor of its shape, under the names of the modules that
lead to it and its own name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Projection = Literal["gate", "up", "down"]


@dataclass(frozen=True)
class StoredAs:
    """Metadata `stored` of a parameter whose own name is another in the checkpoint."""

    name: str


@dataclass(frozen=True)
class StoredRows:
    """Metadata `stored` of a parameter [N, rows, K] that is a part of one matrix [N * period, K].

    Entry n is the rows from `n * period + first` on. The matrix is the `weight` of the module.
    """

    first: int
    period: int


@dataclass(frozen=True)
class StoredExperts:
    """Metadata `stored` of a parameter that holds one or two projections of all E experts.

    A weight is [E, in, out], a bias [E, out]; two projections stand side by side along `out`.
    Which tensors these are differs between architectures: see `ExpertTensors`.
    """

    projections: tuple[Projection, ...]
    bias: bool = False

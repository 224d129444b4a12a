"""Configuration of the overlap, read from the environment once, at the edge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class OverlapConfig:
    """Whether and how steps are cut into micro-batches.

    With `enabled` false the step is the plain one: no split, no barrier, one set of attention work
    buffers. With it true, every step bucket of at least `min_tokens` tokens a device runs as
    `num_micro_batches` interleaved micro-batches; smaller buckets have nothing to cut.
    """

    enabled: bool = False
    num_micro_batches: int = 2
    min_tokens: int = 2

    def __post_init__(self) -> None:
        if self.num_micro_batches < 2:
            raise ValueError(
                f"num_micro_batches must be at least 2, got {self.num_micro_batches}; "
                "use enabled=False for one"
            )
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read `USE_TBO` (0 or 1; unset or empty means 0).

        Raises:
            ValueError: any other value.
        """
        value = (os.environ if environ is None else environ).get("USE_TBO", "")
        if value not in ("", "0", "1"):
            raise ValueError(f"USE_TBO={value} is not understood: expected 0 or 1")
        return cls(enabled=value == "1")

    def micro_batches(self, token_capacity: int) -> int:
        """Number of micro-batches of a step with `token_capacity` token slots a device."""
        return self.num_micro_batches if self.enabled and token_capacity >= self.min_tokens else 1

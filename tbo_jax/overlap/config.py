"""Configuration of the overlap, read from the environment once, at the edge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from tbo_jax.overlap.checks import whole_number

Mode = Literal["off", "on", "auto"]
_MODE_OF_VALUE: dict[str, Mode] = {"": "off", "0": "off", "1": "on", "auto": "auto"}


@dataclass(frozen=True)
class OverlapConfig:
    """Whether and how steps are cut into micro-batches.

    With mode "off" the step is the plain one: no split, no barrier, one set of attention work
    buffers. With "on" every step bucket of at least `min_tokens` tokens a device runs as
    `num_micro_batches` interleaved micro-batches; smaller buckets have nothing to cut. With "auto"
    the engine times both programs of each of these buckets at warm-up and keeps the faster one.
    """

    mode: Mode = "off"
    num_micro_batches: int = 2
    min_tokens: int = 2

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be 'off', 'on' or 'auto', got {self.mode!r}")
        whole_number("num_micro_batches", self.num_micro_batches, 2, "; mode='off' is for one")
        whole_number("min_tokens", self.min_tokens, 1)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read `USE_TBO` (0, 1 or auto; unset or empty means 0).

        Raises:
            ValueError: any other value.
        """
        value = (os.environ if environ is None else environ).get("USE_TBO", "")
        if value not in _MODE_OF_VALUE:
            raise ValueError(f"USE_TBO={value} is not understood: expected 0, 1 or auto")
        return cls(mode=_MODE_OF_VALUE[value])

    @property
    def enabled(self) -> bool:
        """Whether any step may be split."""
        return self.mode != "off"

    def candidates(self, token_capacity: int) -> tuple[int, ...]:
        """Numbers of micro-batches that a step with `token_capacity` token slots a device may have.

        One number, unless the mode is "auto" and there is something to cut: then 1 comes first.
        """
        if not self.enabled or token_capacity < self.min_tokens:
            return (1,)
        return (1, self.num_micro_batches) if self.mode == "auto" else (self.num_micro_batches,)

    def micro_batches(self, token_capacity: int) -> int:
        """Number of micro-batches of such a step; with "auto" that of one that was not timed, 1."""
        return self.candidates(token_capacity)[0]

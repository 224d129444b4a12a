"""Configuration of the overlap, read from the environment once, at the edge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from tbo_jax.overlap.checks import whole_number

Mode = Literal["off", "on", "auto"]
Overlap = Literal["micro_batches", "expert_chunks"]  # a way to overlap
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
_MODE_OF_VALUE: dict[str, Mode] = {"": "off", "0": "off", "1": "on", "auto": "auto"}


@dataclass(frozen=True, order=True)
class Strategy:
    """How the program of a step overlaps. One of both numbers is 1; with both, it does not."""

    micro_batches: int = 1
    expert_chunks: int = 1

    @property
    def name(self) -> Literal["off"] | Overlap:
        """ "off", or as `OverlapConfig` calls it."""
        if self.micro_batches > 1:
            return "micro_batches"
        return "expert_chunks" if self.expert_chunks > 1 else "off"

    @property
    def overlaps(self) -> bool:
        """Whether it is another program than the plain one."""
        return self != OFF

    def __str__(self) -> str:
        """Such as "micro_batches 2"; "off" alone."""
        count = max(self.micro_batches, self.expert_chunks)
        return f"{self.name} {count}" if self.overlaps else self.name


OFF = Strategy()


@dataclass(frozen=True)
class OverlapConfig:
    """Whether and how steps overlap communication with compute.

    With mode "off" the step is the plain one: no split, no barrier, one set of attention work
    buffers. With "on" every step bucket of at least `min_tokens` tokens a device overlaps by
    `strategy`; smaller buckets are plain. With "auto" the engine times the program of each strategy
    at warm-up, the plain one among them, and keeps the fastest.

    Strategies, all equal in result to the plain step:

    - "micro_batches": the step is cut into `num_micro_batches`, which interleave. All of the
      exchange but the last message can be hidden. Every weight is read once for each.
    - "expert_chunks": the step is one batch, and its expert exchange is cut into
      `num_expert_chunks`, one for each group of a device's experts. What travels for one group is
      hidden beside the products of another: half of the exchange with two, three quarters with
      four. Every weight is read once. It is for models with experts; a device needs at least one
      for each chunk.

    With `strategy` None, "on" means "micro_batches" and "auto" all that the model can use. With
    "auto" and a name, that one is compared with the plain step.
    """

    mode: Mode = "off"
    num_micro_batches: int = 2
    min_tokens: int = 2
    strategy: Overlap | None = None
    num_expert_chunks: int = 2

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be 'off', 'on' or 'auto', got {self.mode!r}")
        if self.strategy is not None and self.strategy not in OVERLAPS:
            known = " or ".join(repr(name) for name in OVERLAPS)
            raise ValueError(f"strategy must be None, {known}, got {self.strategy!r}")
        whole_number("num_micro_batches", self.num_micro_batches, 2, "; mode='off' is for one")
        whole_number("num_expert_chunks", self.num_expert_chunks, 2, "; mode='off' is for one")
        whole_number("min_tokens", self.min_tokens, 1)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read `USE_TBO`: 0, 1, auto, or the name of a strategy; unset or empty means 0.

        1 means two micro-batches.

        Raises:
            ValueError: any other value.
        """
        value = (os.environ if environ is None else environ).get("USE_TBO", "")
        if value in OVERLAPS:
            return cls("on", strategy=value)
        if value not in _MODE_OF_VALUE:
            raise ValueError(
                f"USE_TBO={value} is not understood: expected 0, 1, auto, {' or '.join(OVERLAPS)}"
            )
        return cls(mode=_MODE_OF_VALUE[value])

    @property
    def enabled(self) -> bool:
        """Whether any step may overlap."""
        return self.mode != "off"

    @property
    def most_micro_batches(self) -> int:
        """The most that any step may be cut into."""
        return max(strategy.micro_batches for strategy in self._all())

    def candidates(self, token_capacity: int) -> tuple[Strategy, ...]:
        """The strategies that a step with `token_capacity` token slots a device may have.

        One, unless the mode is "auto" and there is something to cut: then the plain step is first.
        """
        return self._all() if token_capacity >= self.min_tokens else (OFF,)

    def _all(self) -> tuple[Strategy, ...]:
        every: dict[Overlap, Strategy] = {
            "micro_batches": Strategy(micro_batches=self.num_micro_batches),
            "expert_chunks": Strategy(expert_chunks=self.num_expert_chunks),
        }
        if self.mode == "off":
            return (OFF,)
        if self.mode == "on":
            return (every[self.strategy or "micro_batches"],)
        return OFF, *([every[self.strategy]] if self.strategy else every.values())

    def chosen(self, token_capacity: int) -> Strategy:
        """That of such a step; with "auto" that of one that was not timed, the plain one."""
        return self.candidates(token_capacity)[0]

    def micro_batches(self, token_capacity: int) -> int:
        """Number of micro-batches of such a step; see `chosen`."""
        return self.chosen(token_capacity).micro_batches

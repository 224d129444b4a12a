"""What a caller asks of one request's decoding. Host side only: importing this never loads JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_SEED = 2**63 - 1


def _refuse(field: str, value: object, expected: str) -> ValueError:
    return ValueError(f"SamplingParams.{field} is {value!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to decode one request.

    The filters apply in this order: temperature, then top-k, then top-p over what top-k left
    (renormalised), then min-p relative to the most probable token.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: the logits are divided by it; 0 is greedy decoding, which ignores the filters.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the fewest most probable tokens whose mass reaches it, in (0, 1]; 1 is off.
        min_p: drop tokens less probable than this fraction of the best one's, in [0, 1]; 0 is off.
        seed: with temperature > 0, the same seed gives the same tokens in any batch: exactly in
            float32, and up to rounding in bfloat16, where steps of other shapes round otherwise and
            a token that was nearly another one may become it. None lets the engine draw a seed.
        stop: texts that end the generation. One string is taken as a tuple of one.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        ValueError: a value of the wrong type or out of range; names field, value and range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._set_int("max_new_tokens", 1, None)
        self._set_int("top_k", 0, None)
        if self.seed is not None:
            self._set_int("seed", 0, MAX_SEED)
        self._set_float("temperature", 0.0, math.inf, "a finite number, 0 or more")
        self._set_float("top_p", 0.0, 1.0, "a number in (0, 1]")
        if self.top_p == 0.0:
            raise _refuse("top_p", self.top_p, "a number in (0, 1]")
        self._set_float("min_p", 0.0, 1.0, "a number in [0, 1]")
        if not isinstance(self.ignore_eos, bool):
            raise _refuse("ignore_eos", self.ignore_eos, "True or False")
        self._set_stop()

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen once this is over

    def _set_int(self, field: str, low: int, high: int | None) -> None:
        value = getattr(self, field)
        integral = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not integral or value < low or (high is not None and value > high):
            limits = f"{low} or more" if high is None else f"from {low} to {high}"
            raise _refuse(field, value, f"an integer, {limits}")
        self._set(field, int(value))

    def _set_float(self, field: str, low: float, high: float, expected: str) -> None:
        value = getattr(self, field)
        real = isinstance(value, int | float | np.integer | np.floating)
        if not real or isinstance(value, bool):
            raise _refuse(field, value, expected)
        try:
            number = float(value)
        except OverflowError:
            raise _refuse(field, value, expected) from None
        if not (math.isfinite(number) and low <= number <= high):
            raise _refuse(field, value, expected)
        self._set(field, number)

    def _set_stop(self) -> None:
        expected = "a non-empty string, or a list or tuple of them"
        if isinstance(self.stop, str):
            stop: tuple[Any, ...] = (self.stop,)
        elif isinstance(self.stop, list | tuple):
            stop = tuple(self.stop)
        else:
            raise _refuse("stop", self.stop, expected)
        if not all(isinstance(text, str) and text for text in stop):
            raise _refuse("stop", self.stop, expected)
        self._set("stop", stop)

"""Counts and times of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineStatistics:
    """Counts and times since the engine was made. Times in seconds.

    A step that was dispatched, and whose requests all turned out to be over, does not count.
    """

    steps: int = 0
    steps_split: int = 0  # run as several micro-batches
    steps_ahead: int = 0  # dispatched before the tokens of the step before were read
    generated_tokens: int = 0  # without end-of-sequence tokens
    sampled_rows: int = 0  # sequences of all steps that got a token, or with drafts several
    drafted_tokens: int = 0  # verified
    accepted_tokens: int = 0  # of them
    prompt_tokens: int = 0
    step_seconds: float = 0.0
    compile_seconds: float = 0.0
    link_bytes: int = 0  # sent by a device to others; with a ragged transport the most it can be
    steps_by_bucket: dict[str, int] = field(default_factory=dict)
    # Of USE_TBO=auto, by bucket: micro_batches, seconds by their number, and the reason.
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)

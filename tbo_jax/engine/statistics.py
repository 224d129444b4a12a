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
    steps_in_chunks: int = 0  # run with the expert exchange in chunks
    steps_ahead: int = 0  # dispatched before the tokens of the step before were read
    generated_tokens: int = 0  # without end-of-sequence tokens
    sampled_rows: int = 0  # sequences of all steps that got a token, or with drafts several
    drafted_tokens: int = 0  # verified
    accepted_tokens: int = 0  # of them
    prompt_tokens: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0  # of them, in which the host waited for the device
    compile_seconds: float = 0.0
    link_bytes: int = 0  # sent by a device to others; with a ragged transport the most it can be
    steps_by_bucket: dict[str, int] = field(default_factory=dict)
    # Of USE_TBO=auto, by bucket: the strategy, seconds and gains by strategy, and the reason.
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def compiled(self, seconds: float) -> None:
        """Book what the compiler took for a bucket."""
        self.compile_seconds += seconds

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts, as a part of those verified; 0 without any."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def tokens_per_row(self) -> float:
        """Tokens that a sequence got in a step, on average; 0 before the first."""
        return self.generated_tokens / self.sampled_rows if self.sampled_rows else 0.0

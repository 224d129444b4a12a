"""What the scheduler hands to the engine: which tokens a step computes; and its counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tbo_jax.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledSequence:
    """token_ids[num_computed : num_computed + num_tokens] of a request, which has their pages."""

    request: Request
    num_tokens: int
    samples: bool  # all known tokens are then computed: the last one's logits give a new token


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: for each rank its sequences, decodes first."""

    ranks: tuple[tuple[ScheduledSequence, ...], ...]

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens to compute on each rank."""
        return tuple(sum(s.num_tokens for s in rank) for rank in self.ranks)

    @property
    def sequences(self) -> list[ScheduledSequence]:
        """Those of all ranks, rank after rank."""
        return [s for rank in self.ranks for s in rank]

    @property
    def is_dead(self) -> bool:
        """Whether all of its requests have finished since it was made; true if it has none."""
        return all(s.request.is_finished for s in self.sequences)


class RankStep:
    """A rank's part of a plan under construction."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[ScheduledSequence] = []

    def add(self, request: Request) -> None:
        """Schedule as many of its tokens as the budget has room for."""
        num_tokens = min(request.num_uncomputed, self.budget)
        self.budget -= num_tokens
        samples = num_tokens == request.num_uncomputed
        self.sequences.append(ScheduledSequence(request, num_tokens, samples))


@dataclass(slots=True)
class SchedulerStatistics:
    """Counts since the start. Steps and tokens count when they are committed."""

    steps: int = 0
    decode_tokens: int = 0  # computed, one a sequence and step
    prefill_tokens: int = 0  # computed, those of preempted requests again
    generated_tokens: int = 0
    admissions: int = 0  # those of preempted requests again
    preemptions: int = 0
    discarded_tokens: int = 0  # had been computed when their request was preempted
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "error": 0}
    )

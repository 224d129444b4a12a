"""What the scheduler hands to the engine: which tokens a step computes; and its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tbo_jax.engine.scheduling.limits import Limits
from tbo_jax.engine.scheduling.rank import Rank
from tbo_jax.engine.scheduling.request import FinishReason, Request

Propose = Callable[[Request], Sequence[int]]  # draft tokens for what may follow its tokens


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledSequence:
    """Tokens of a request from the num_computed-th on, then its drafts; it has pages for all."""

    request: Request
    num_tokens: int  # drafts included
    samples: bool  # all known tokens are then computed: the last one's logits give a new token
    drafts: tuple[int, ...] = ()  # guesses at the next tokens, computed to be verified

    @property
    def token_ids(self) -> list[int]:
        """What is computed."""
        start = self.request.num_computed
        known = self.num_tokens - len(self.drafts)
        return [*self.request.token_ids[start : start + known], *self.drafts]

    def accept(self, sampled: Sequence[int]) -> list[int]:
        """The new tokens, of those sampled after the last known token and after each draft.

        A draft stands if it is the very token sampled in its place, and each one before it stands;
        then the token sampled after it is one more. So the tokens are those of decoding one by one:
        a token that is drawn depends on the logits, the seed and its index only (`sample`). For a
        draft that is no distribution but one token this also is speculative sampling (Leviathan et
        al. 2023): it stands with its probability, and otherwise one is drawn from the rest.
        """
        count = 0
        while count < len(self.drafts) and self.drafts[count] == sampled[count]:
            count += 1
        return list(sampled[: count + 1])


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
    def num_drafts(self) -> int:
        """Draft tokens on all ranks."""
        return sum(len(s.drafts) for s in self.sequences)

    @property
    def is_dead(self) -> bool:
        """Whether all of its requests have finished since it was made; true if it has none."""
        return all(s.request.is_finished for s in self.sequences)

    def check_sampled(
        self,
        sampled: Mapping[int, Sequence[int]],
        stopped: Collection[int],
        failed: Collection[int],
    ) -> None:
        """ValueError if new tokens, or the requests that end, are not those of this step."""
        sampling = {s.request.request_id: s for s in self.sequences if s.samples}
        required = {i for i, sequence in sampling.items() if not sequence.request.is_finished}
        if not required <= sampled.keys() <= sampling.keys():
            raise ValueError(
                f"got tokens of requests {sorted(sampled)}; expected {sorted(required)}"
            )
        for request_id, tokens in sampled.items():
            drafts, accepted = sampling[request_id].drafts, tuple(tokens[:-1])
            # One that fails has none, and one with drafts may have none.
            fits = not tokens if request_id in failed else tokens or drafts
            if not fits or drafts[: len(accepted)] != accepted:
                raise ValueError(
                    f"got tokens {list(tokens)} of request {request_id}; expected some of its "
                    f"drafts {list(drafts)} and one more"
                )
        if not {i for i, tokens in sampled.items() if tokens} >= set(stopped):
            raise ValueError(f"requests {sorted(stopped)} stopped; expected some of the sampled")
        if not sampled.keys() >= set(failed):
            raise ValueError(f"requests {sorted(failed)} failed; expected some of the sampled")


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

    @property
    def in_order(self) -> tuple[ScheduledSequence, ...]:
        """Its sequences, decodes first: one that finds all but its last token is one of them."""
        return tuple(sorted(self.sequences, key=lambda sequence: sequence.request.is_prefill))

    @property
    def decodes_only(self) -> bool:
        """Whether each of its sequences has one token to compute, the one sampled last."""
        return not any(s.request.is_prefill for s in self.sequences)

    def add_drafts(self, rank: Rank, limits: Limits, propose: Propose) -> None:
        """Have the sequences verify drafts, as many as there is budget, room and free pages for."""
        for index, sequence in enumerate(self.sequences):
            request = sequence.request
            # One place is for the token that is sampled after the last draft.
            most = min(self.budget, limits.room(request) - 1, rank.room(request))
            drafts = tuple(propose(request)[:most]) if most > 0 else ()
            if drafts:
                rank.grow(request, len(drafts))
                self.budget -= len(drafts)
                count = sequence.num_tokens + len(drafts)
                self.sequences[index] = dataclasses.replace(
                    sequence, num_tokens=count, drafts=drafts
                )


@dataclass(slots=True)
class SchedulerStatistics:
    """Counts since the start. Steps and tokens count when they are committed."""

    steps: int = 0
    decode_tokens: int = 0  # computed, one a sequence and step, and the drafts
    prefill_tokens: int = 0  # computed, those of preempted requests again
    generated_tokens: int = 0
    admissions: int = 0  # those of preempted requests again
    preemptions: int = 0
    discarded_tokens: int = 0  # had been computed when their request was preempted
    cached_tokens: int = 0  # found in pages that were kept, not computed
    evictions: int = 0  # pages that were kept, and whose place was needed
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )

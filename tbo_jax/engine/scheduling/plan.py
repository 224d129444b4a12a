"""What the scheduler hands to the engine: which tokens a step computes; and its counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from tbo_jax.engine.scheduling.rank import Rank
from tbo_jax.engine.scheduling.request import FinishReason, Request
from tbo_jax.engine.scheduling.rows import Rows

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
        return accepted(self.drafts, sampled)


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What `ScheduledSequence.accept` gives."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return list(sampled[: count + 1])


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The sequences of a step that sample, decodes first, as arrays [N]."""

    ranks: np.ndarray  # intp
    rows: np.ndarray  # intp, of `Rows`
    places: np.ndarray  # intp, among the sequences of the step on their rank
    requests: np.ndarray  # of `Request`
    request_ids: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """One that samples, and where its logits are."""

    request: Request
    rank: int
    row: int  # of its rank's logits: that of its last token, and those of its drafts follow
    drafts: tuple[int, ...]


class StepPlan:
    """One step: for each rank its decodes, in the order of their rows, then its prefills.

    Attributes:
        num_decodes: int [R], sequences that decode.
        prefills: for each rank those that compute more, or the first token of all.
        drafts: number of a decode among the sampled -> the drafts that it verifies.
        new_pages: (rank, row, place in the page table, page) of those that decodes got for it.
        sampled: the sequences that give a token.
        with_decodes: whether decodes take part, if there are any.
    """

    def __init__(
        self,
        rows: Rows,
        prefills: Sequence[Sequence[ScheduledSequence]],
        drafts: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        new_pages: Sequence[tuple[int, int, int, int]] = (),
        with_decodes: bool = True,
    ) -> None:
        """Take what decodes in `rows` now, unless without, and prefills of each rank."""
        self.with_decodes = with_decodes
        self.prefills = tuple(map(tuple, prefills))
        self.drafts = drafts
        self.new_pages = new_pages
        ranks, at = np.nonzero(rows.decoding & with_decodes)
        self.num_decodes = np.bincount(ranks, minlength=len(self.prefills))
        places = np.arange(len(ranks)) - (np.cumsum(self.num_decodes) - self.num_decodes)[ranks]
        sampled = [ranks, at, places, rows.requests[ranks, at], rows.request_ids[ranks, at]]
        last = [
            (rank, one.request.row, count + place, one.request, one.request.request_id)
            for rank, count in enumerate(self.num_decodes.tolist())
            for place, one in enumerate(self.prefills[rank])
            if one.samples
        ]
        if last:
            columns = zip(sampled, zip(*last, strict=True), strict=True)
            sampled = [np.append(column, np.array(more, column.dtype)) for column, more in columns]
        self.sampled = SampledRows(*sampled)

    @property
    def has_work(self) -> bool:
        """Whether it computes anything."""
        return len(self.sampled) > 0 or any(self.prefills)

    @property
    def num_sequences(self) -> np.ndarray:
        """Sequences of each rank, int [R]."""
        return self.num_decodes + np.array([len(rank) for rank in self.prefills])

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens to compute on each rank, int [R]."""
        counts = self.num_decodes + [sum(s.num_tokens for s in rank) for rank in self.prefills]
        for number, drafts in self.drafts.items():
            counts[self.sampled.ranks[number]] += len(drafts)
        return counts

    @property
    def num_drafts(self) -> int:
        """Draft tokens on all ranks."""
        return sum(map(len, self.drafts.values()))

    @functools.cached_property
    def logit_rows(self) -> np.ndarray:
        """The first row of the logits of each sampled sequence on its rank, int [N]."""
        of = self.sampled
        if not self.drafts:
            return of.places
        lengths = np.ones(len(of), np.intp)  # in order of the ranks: all are decodes
        for number, drafts in self.drafts.items():
            lengths[number] += len(drafts)
        before = np.cumsum(lengths) - lengths
        rows: np.ndarray = before - before[np.searchsorted(of.ranks, of.ranks)]
        return rows

    def sampled_of(self, request_ids: Collection[int]) -> list[SampledSequence]:
        """The sampled sequences of some requests."""
        of = self.sampled
        wanted = np.isin(of.request_ids, np.fromiter(request_ids, np.int64, len(request_ids)))
        return [
            SampledSequence(
                of.requests[number],
                int(of.ranks[number]),
                int(self.logit_rows[number]),
                self.drafts.get(number, ()),
            )
            for number in np.flatnonzero(wanted).tolist()
        ]

    @functools.cached_property
    def ranks(self) -> tuple[tuple[ScheduledSequence, ...], ...]:
        """The sequences of each rank one by one, which takes its time with many."""
        decodes: list[list[ScheduledSequence]] = [[] for _ in self.prefills]
        in_all = int(self.num_decodes.sum())
        for number, request in enumerate(self.sampled.requests[:in_all]):
            drafts = self.drafts.get(number, ())
            sequence = ScheduledSequence(request, 1 + len(drafts), True, drafts)
            decodes[self.sampled.ranks[number]].append(sequence)
        return tuple((*a, *b) for a, b in zip(decodes, self.prefills, strict=True))

    @property
    def sequences(self) -> list[ScheduledSequence]:
        """Those of all ranks, rank after rank."""
        return [s for rank in self.ranks for s in rank]

    @property
    def is_dead(self) -> bool:
        """Whether all of its requests have finished since it was made; true if it has none."""
        first = (s.request for rank in self.prefills for s in rank)
        return all(r.is_finished for r in first) and all(
            request.is_finished for request in self.sampled.requests
        )


class RankStep:
    """A rank's part of a plan under construction: the tokens left of its budget, and prefills."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prefills: list[ScheduledSequence] = []

    def add(self, request: Request, wanted: int) -> None:
        """Schedule as many of so many tokens as the budget has room for."""
        num_tokens = min(wanted, self.budget)
        self.budget -= num_tokens
        samples = num_tokens == request.num_uncomputed
        self.prefills.append(ScheduledSequence(request, num_tokens, samples))

    def drafts(self, rank: Rank, request: Request, propose: Propose) -> tuple[int, ...]:
        """Drafts for a decode, as many as there is budget, room and free pages for."""
        # One place is for the token that is sampled after the last draft.
        room = rank.limits.most_tokens(request) - request.num_tokens
        most = min(self.budget, room - 1, rank.room(request))
        drafts = tuple(propose(request)[:most]) if most > 0 else ()
        if drafts:
            rank.grow(request, len(drafts))
            self.budget -= len(drafts)
        return drafts


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

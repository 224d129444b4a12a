"""What the scheduler hands to the engine: which tokens a step computes; and its counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from tbo_jax.engine.prompt_lookup import TO_FIND, prompt_lookup
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


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The sequences of a step that sample, decodes first, as arrays [N]."""

    at: np.ndarray  # intp, rank and row as one number: rank * S + row
    ranks: np.ndarray  # intp
    rows: np.ndarray  # intp, of `Rows`
    places: np.ndarray  # intp, among the sequences of the step on their rank
    requests: np.ndarray  # of `Request`
    request_ids: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """One that samples, and its place among the sequences of its rank."""

    request: Request
    rank: int
    place: int
    drafts: tuple[int, ...]  # `TO_FIND` as long as its last token is not read


class StepPlan:
    """One step: for each rank its decodes, in the order of their rows, then its prefills.

    Attributes:
        num_decodes: int [R], sequences that decode.
        prefills: for each rank those that compute more, or the first token of all.
        num_drafts: int [N], how many drafts each of the sampled verifies.
        proposed: number of one among the sampled -> its drafts; the device finds those of others.
        is_live: bool [N], whether what it samples counts: not if the device was ahead of what is
            known to stand.
        new_pages: (rank, row, place in the page table, page) of those that decodes got for it.
        sampled: the sequences that give a token.
        with_decodes: whether decodes take part, if there are any.
    """

    def __init__(
        self,
        rows: Rows,
        prefills: Sequence[Sequence[ScheduledSequence]],
        drafts: np.ndarray | None = None,
        most_drafts: int = 0,
        proposed: Mapping[Request, tuple[int, ...]] = MappingProxyType({}),
        new_pages: Sequence[tuple[int, int, int, int]] = (),
        with_decodes: bool = True,
    ) -> None:
        """Take what decodes in `rows` now, unless without, and prefills of each rank.

        Args:
            rows: of all ranks.
            prefills, new_pages, with_decodes: as the attributes.
            drafts: int [R, S], how many drafts the decodes verify; None: nothing.
            most_drafts: how many the device finds of each sequence, of which the first are these.
            proposed: those that the device does not find, as many as `drafts` says.
        """
        self.with_decodes = with_decodes
        self.prefills = tuple(map(tuple, prefills))
        self.new_pages = new_pages
        self._most_drafts = most_drafts
        ranks, at = np.nonzero(rows.decoding & with_decodes)
        self.num_decodes = np.bincount(ranks, minlength=len(self.prefills))
        places = np.arange(len(ranks)) - (np.cumsum(self.num_decodes) - self.num_decodes)[ranks]
        flat = ranks * rows.limits.max_sequences + at
        sampled = [ranks, at, places, rows.requests.take(flat), rows.request_ids.take(flat)]
        last = [
            (rank, one.request.row, count + place, one.request, one.request.request_id)
            for rank, count in enumerate(self.num_decodes.tolist())
            for place, one in enumerate(self.prefills[rank])
            if one.samples
        ]
        if last:
            columns = zip(sampled, zip(*last, strict=True), strict=True)
            sampled = [np.append(column, np.array(more, column.dtype)) for column, more in columns]
            flat = sampled[0] * rows.limits.max_sequences + sampled[1]
        self.sampled = SampledRows(flat, *sampled)
        self.is_live = np.ones(len(self.sampled), bool)
        self.num_drafts = np.zeros(len(self.sampled), np.intp)
        if drafts is not None:
            self.num_drafts[: len(ranks)] = drafts[ranks, at]
        decodes = self.sampled.requests[: len(ranks)] if proposed else ()
        self.proposed = {n: proposed[one] for n, one in enumerate(decodes) if one in proposed}

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
        if self.has_drafts:
            ranks = self.sampled.ranks
            counts += np.bincount(ranks, self.num_drafts, len(self.prefills)).astype(np.intp)
        return counts

    def has_unread(self, request_ids: Collection[int]) -> bool:
        """Whether the last token of a sampled sequence of some requests is not read."""
        numbers = self._numbers_of(request_ids)
        return any(self.sampled.requests[number].has_unread for number in numbers)

    @functools.cached_property
    def has_drafts(self) -> bool:
        """Whether any sequence verifies drafts."""
        return bool(self.num_drafts.any())

    def drafts(self, number: int) -> tuple[int, ...]:
        """Those of a sampled sequence; `TO_FIND` as long as its last token is not read."""
        count = int(self.num_drafts[number])
        if not count or number in self.proposed:
            return self.proposed.get(number, ())
        known = self.sampled.requests[number].token_ids
        if known[-1] < 0:
            return (TO_FIND,) * count
        tokens, counts = np.array([known], np.int32), np.array([len(known)], np.int32)
        found = prompt_lookup(tokens, counts, self._most_drafts)
        return tuple(found[0, :count].tolist())

    def sampled_of(self, request_ids: Collection[int]) -> list[SampledSequence]:
        """The sampled sequences of some requests."""
        of = self.sampled
        return [
            SampledSequence(
                of.requests[number],
                int(of.ranks[number]),
                int(of.places[number]),
                self.drafts(number),
            )
            for number in self._numbers_of(request_ids)
        ]

    def _numbers_of(self, request_ids: Collection[int]) -> list[int]:
        wanted = np.fromiter(request_ids, np.int64, len(request_ids))
        return np.flatnonzero(np.isin(self.sampled.request_ids, wanted)).tolist()

    @functools.cached_property
    def ranks(self) -> tuple[tuple[ScheduledSequence, ...], ...]:
        """The sequences of each rank one by one, which takes its time with many."""
        decodes: list[list[ScheduledSequence]] = [[] for _ in self.prefills]
        in_all = int(self.num_decodes.sum())
        for number, request in enumerate(self.sampled.requests[:in_all]):
            drafts = self.proposed.get(number, (TO_FIND,) * int(self.num_drafts[number]))
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

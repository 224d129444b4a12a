from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax.engine.dispatch import PromptChunk, prompt_chunks
from tbo_jax.engine.prompt_lookup import TO_FIND
from tbo_jax.engine.scheduling.plan import ScheduledSequence, StepPlan
from tbo_jax.engine.scheduling.rank import turn_of
from tbo_jax.engine.scheduling.request import Request, unread_token
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.sampling.logprobs import PromptLogprobs
from tbo_jax.sampling.params import SamplingParams


def next_token(prefix: list[int] | tuple[int, ...]) -> int:
    """The stand-in for the model: any change anywhere in the prefix changes the token."""
    return zlib.crc32(repr(list(prefix)).encode()) % 997


def seen(tokens: list[int], window: int | None) -> list[int]:
    """Those that the last one sees, itself too."""
    return tokens if window is None else tokens[-window:]


class Model:
    """A cache of token ids in pages, and the rows as the device knows them, ahead of the host.

    A new token comes from what the pages say, not the request.
    """

    def __init__(
        self, num_ranks: int, num_pages: int, page_size: int, window: int | None = None
    ) -> None:
        self.window = window
        self.page_size = page_size
        self.slots = [[-1] * (num_pages * page_size) for _ in range(num_ranks)]
        self.tables: dict[tuple[int, int], list[int]] = {}  # the pages of each row
        self.known: dict[tuple[int, int], list[int]] = {}  # and its tokens

    def tell(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """The changes of a step; with these the device knows the pages of all of its sequences."""
        rows = scheduler.rows
        for rank, row in np.argwhere(rows.stale).tolist():
            request = rows.requests[rank, row]
            self.tables[rank, row] = list(request.pages)
            if not request.has_unread:
                self.known[rank, row] = list(request.token_ids)
        rows.stale[:] = False
        of, count = plan.sampled, plan.num_decodes.sum()
        decodes = set(zip(of.ranks[:count].tolist(), of.rows[:count].tolist(), strict=True))
        for rank, row, at, page in plan.new_pages:
            assert (rank, row) in decodes
            self.tables[rank, row][at : at + 1] = [page]
        for sequence in plan.sequences:
            request = sequence.request
            assert request.rank is not None and request.row is not None
            table = self.tables[request.rank, request.row]
            gone = request.num_dropped
            assert table[gone : len(request.pages)] == request.pages[gone:]

    def run(self, plan: StepPlan, before: Dispatched | None = None) -> dict[int, NewTokens]:
        """What each request gets; `before` is the step whose tokens the requests lack still."""
        tokens = {}
        for slots, sequences in zip(self.slots, plan.ranks, strict=True):
            for sequence in sequences:
                request, drafts = sequence.request, sequence.drafts
                assert request.rank is not None
                known = self.known[request.rank, request.row]
                pages = self.tables[request.rank, request.row][: len(request.pages)]
                if request.is_prefill:
                    start, given = request.num_computed, sequence.token_ids
                else:
                    check_last(sequence, known, before)
                    start = len(known) - 1
                    if TO_FIND in drafts:
                        drafts = tuple(guess(known, len(drafts), window=self.window))
                    given = [known[-1], *drafts]
                end = start + len(given)
                places = [
                    pages[i // self.page_size] * self.page_size + i % self.page_size
                    for i in range(end)
                ]
                for i, token in enumerate(given, start):
                    slots[places[i]] = token
                if sequence.samples:
                    held = [slots[place] for place in places]
                    last = end - len(drafts)
                    ends = range(last, end + 1)
                    new = accepted(drafts, [next_token(seen(held[:n], self.window)) for n in ends])
                    known += [*new[:-1], 0 if is_bad(new[-1]) else new[-1]]
                    tokens[request.request_id] = NewTokens(new, bool(drafts))
        return tokens


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The new tokens, of those sampled after the last known token and after each draft."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count] and not is_bad(sampled[count]):
        count += 1
    return list(sampled[: count + 1])


def check_last(sequence: ScheduledSequence, known: list[int], before: Dispatched | None) -> None:
    """The last token that the host knows, or where it says that the device has it."""
    request, token = sequence.request, sequence.request.token_ids[-1]
    if token >= 0:
        assert token == known[-1]
        return
    assert before is not None and request.rank is not None
    rows = before.plan.ranks[request.rank]
    (row,) = [i for i in range(len(rows)) if unread_token(i) == token]
    assert rows[row].samples and rows[row].request is request


@dataclass(frozen=True)
class NewTokens:
    """What a step samples for a request, as far as drafts stand; what is after an end too."""

    tokens: list[int]
    had_drafts: bool

    @property
    def counted(self) -> list[int]:
        """Up to the first that ends the request, or is none."""
        for at, token in enumerate(self.tokens):
            if is_end(token):
                return self.tokens[: at + 1]
            if is_bad(token):
                return self.tokens[:at]
        return self.tokens

    @property
    def is_redone(self) -> bool:
        """Whether a draft may be the reason that the last one is none."""
        rest = self.tokens[len(self.counted) :]
        return self.had_drafts and any(map(is_bad, rest[:1]))


@dataclass(frozen=True)
class Dispatched:
    """A plan that was run while the one before it was not committed."""

    plan: StepPlan
    tokens: dict[int, NewTokens]
    chunks: list[PromptChunk]


def make(
    request_id: int, prompt: int, max_new_tokens: int = 100, shared: int = 0, priority: int = 0
) -> Request:
    """Of the prompt `shared` tokens are those of all others, and half as many more of every third."""
    first, second = min(shared, prompt), min(shared + shared // 2, prompt)
    ids = tuple(
        i
        if i < first
        else 1000 * (1 + request_id % 3) + i
        if i < second
        else 10_000 * request_id + i
        for i in range(prompt)
    )
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(request_id, ids, params, priority=priority)


def scheduler_of(**sizes: int) -> Scheduler:
    defaults = {
        "num_ranks": 1,
        "num_pages": 101,
        "page_size": 4,
        "max_sequences": 4,
        "max_tokens": 16,
        "max_context": 64,
    }
    return Scheduler(**(defaults | sizes))


def shape(plan: StepPlan) -> list[list[tuple[int, int, bool]]]:
    return [[(s.request.request_id, s.num_tokens, s.samples) for s in rank] for rank in plan.ranks]


def step(scheduler: Scheduler) -> list[list[tuple[int, int, bool]]]:
    plan = scheduler.schedule()
    result = shape(plan)
    book(scheduler, plan, {s.request.request_id: [7] for s in plan.sequences if s.samples})
    scheduler.check()
    return result


def book(
    scheduler: Scheduler,
    plan: StepPlan,
    sampled: Mapping[int, Sequence[int]],
    stopped: Collection[int] = (),
    failed: Mapping[int, str] = MappingProxyType({}),
    redone: Collection[int] = (),
) -> list[Request]:
    """Commit the new tokens of each request, by its id."""
    ids = plan.sampled.request_ids.tolist()
    number = {request_id: at for at, request_id in enumerate(ids)}
    new = [[] if i in failed else list(sampled.get(i, [-99])) for i in ids]
    widest = max([1, *map(len, new)])
    tokens = np.array([[*of, *[-99] * (widest - len(of))] for of in new], np.int64)
    return scheduler.commit(
        plan,
        tokens.reshape(len(ids), widest),
        np.array(list(map(len, new)), np.int64),
        np.isin(ids, list(stopped)),
        {number[i]: why for i, why in failed.items()},
        [number[i] for i in redone],
    )


def free_pages(scheduler: Scheduler) -> list[int]:
    """Of each rank."""
    return [rank.pages.num_free for rank in scheduler._ranks]


# What is refused


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"max_sequences": 0}, "max_sequences must be at least 1, got 0"),
        ({"num_pages": 1}, "num_pages must be at least 2, got 1"),
        ({"max_context": 1}, "max_context must be at least 2, got 1"),
        ({"num_ranks": True}, "num_ranks must be an integer from 1, got True"),
        ({"page_size": 4.0}, r"page_size must be an integer from 1, got 4\.0"),
        ({"max_sequences": 17}, "max_tokens is 16; expected at least max_sequences, 17"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler_of(**sizes)


@pytest.mark.parametrize(
    ("prompt", "sizes", "message"),
    [
        (0, {}, "request 5 has an empty prompt"),
        (64, {}, "prompt of 64 tokens; expected at most 63"),
        (8, {"num_pages": 3}, "prompt of 8 tokens; expected at most 7"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(
    prompt: int, sizes: dict[str, int], message: str
) -> None:
    scheduler = scheduler_of(**sizes)
    with pytest.raises(ValueError, match=message):
        scheduler.add(make(5, prompt))
    assert not scheduler.has_work
    scheduler.add(make(5, max(1, prompt - 1)))
    step(scheduler)


def test_an_id_in_use_and_a_request_added_before_are_refused() -> None:
    scheduler = scheduler_of()
    request = make(1, 3, max_new_tokens=1)
    scheduler.add(request)
    with pytest.raises(ValueError, match="request 1 exists already"):
        scheduler.add(make(1, 4))
    step(scheduler)
    with pytest.raises(ValueError, match="request 1 was added before"):
        scheduler.add(request)
    scheduler.add(make(1, 4))


# The plan


def test_decodes_come_first_and_prefills_are_cut_to_the_budget() -> None:
    scheduler = scheduler_of(max_tokens=8)
    for request_id, prompt in ((0, 3), (1, 10), (2, 4)):
        scheduler.add(make(request_id, prompt))
    assert step(scheduler) == [[(0, 3, True), (1, 5, False)]]
    assert step(scheduler) == [[(0, 1, True), (1, 5, True), (2, 2, False)]]
    assert step(scheduler) == [[(0, 1, True), (1, 1, True), (2, 2, True)]]
    assert step(scheduler) == [[(0, 1, True), (1, 1, True), (2, 1, True)]]


def test_a_one_token_prompt_samples_at_once() -> None:
    scheduler = scheduler_of()
    scheduler.add(make(0, 1))
    assert step(scheduler) == [[(0, 1, True)]]


def test_requests_go_to_the_rank_with_most_pages_to_spare() -> None:
    scheduler = scheduler_of(num_ranks=3, max_sequences=2)
    for request_id, prompt in enumerate((9, 1, 5, 1, 1, 1, 1)):
        scheduler.add(make(request_id, prompt))
    placed = [[s[0] for s in rank] for rank in step(scheduler)]
    # Equal ranks fill by index; then rank 1 has 98 to spare, rank 2 has 97 and rank 0 has 96.
    assert placed == [[0, 5], [1, 3], [2, 4]]  # and the last one waits


def test_a_rank_without_a_row_is_passed_over_whatever_pages_it_has() -> None:
    scheduler = scheduler_of(num_ranks=2, max_sequences=2, max_tokens=64)
    for request_id, prompt in enumerate((40, 1, 1, 1)):
        scheduler.add(make(request_id, prompt))
    placed = [[s[0] for s in rank] for rank in step(scheduler)]
    assert placed == [[0, 3], [1, 2]]  # rank 1 had more pages to spare for the last one


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    scheduler = scheduler_of(num_pages=6)
    for request_id, prompt in ((0, 8), (1, 12), (2, 1)):
        scheduler.add(make(request_id, prompt))
    # Request 1 needs the 3 pages left, of which one is spared for the growth of request 0.
    assert step(scheduler) == [[(0, 8, True)]]


@pytest.mark.parametrize(("prefix_cache", "found"), [(False, 0), (True, 8)])
def test_the_youngest_is_preempted_and_computed_anew(prefix_cache: bool, found: int) -> None:
    """But for the full pages of it that nobody needed: there is one page more than they take."""
    scheduler = scheduler_of(num_pages=6, max_tokens=32, prefix_cache=prefix_cache)
    old, young = make(0, 7), make(1, 8)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    assert [len(old.pages), len(young.pages)] == [2, 2]
    while young.num_preemptions == 0:
        step(scheduler)
    scheduler.add(make(2, 1))
    tokens = list(young.token_ids)
    assert old.rank == 0 and young.rank is None and young.num_computed == 0
    assert scheduler.statistics.preemptions == 1
    assert scheduler.statistics.discarded_tokens == len(tokens) - 1
    scheduler.finish(old, "stop")
    resumed = step(scheduler)
    assert resumed == [[(1, len(tokens) - found, True), (2, 1, True)]]
    assert young.token_ids[:-1] == tokens
    assert young.num_cached == 0 and scheduler.statistics.cached_tokens == found


def test_one_that_comes_back_to_a_rank_stands_before_younger_ones() -> None:
    scheduler = scheduler_of(num_ranks=2, num_pages=6, max_tokens=32)
    first, full, old = make(0, 7), make(1, 17), make(2, 7)
    for request in (first, full, old):
        scheduler.add(request)
    step(scheduler)
    assert [r.rank for r in (first, full, old)] == [0, 1, 0]
    scheduler.finish(full, "stop")
    young = make(3, 1)
    scheduler.add(young)
    while not old.num_preemptions:
        step(scheduler)
    assert [r.rank for r in (first, old, young)] == [0, 1, 1]
    assert [r.request_id for r in scheduler._ranks[1].running] == [2, 3]
    assert step(scheduler) == [[(0, 1, True)], [(3, 1, True), (2, 1, True)]]  # by rows


# Priorities


def test_the_lower_number_is_admitted_first_and_equals_as_they_came() -> None:
    scheduler = scheduler_of(max_sequences=2)
    for request_id, priority in enumerate((1, 0, 1, -5, 0)):
        scheduler.add(make(request_id, 3, max_new_tokens=1, priority=priority))
    admitted = []
    while scheduler.has_work:
        admitted.append([request_id for request_id, *_ in step(scheduler)[0]])
    assert admitted == [[3, 1], [4, 0], [2]]


def test_what_runs_is_not_preempted_for_one_that_waits() -> None:
    scheduler = scheduler_of(max_sequences=1)
    scheduler.add(make(0, 3, max_new_tokens=3, priority=9))
    step(scheduler)
    scheduler.add(make(1, 3, max_new_tokens=1, priority=0))
    assert [step(scheduler)[0][0][0] for _ in range(3)] == [0, 0, 1]
    assert scheduler.statistics.preemptions == 0


@pytest.mark.parametrize(
    ("priorities", "victim"), [((0, 0), 1), ((3, 2), 0), ((2, 3), 1), ((-1, -2), 0)]
)
def test_the_victim_has_the_highest_number_and_came_last(
    priorities: tuple[int, int], victim: int
) -> None:
    scheduler = scheduler_of(num_pages=6, max_tokens=32, max_context=20)
    requests = [make(i, 7 + i, priority=priority) for i, priority in enumerate(priorities)]
    for request in requests:
        scheduler.add(request)
    while not scheduler.statistics.preemptions:
        step(scheduler)
    assert [request.num_preemptions for request in requests] == [victim == 0, victim == 1]
    while scheduler.has_work:
        step(scheduler)
    assert [request.num_tokens for request in requests] == [20, 20]


def test_prefills_go_on_in_the_order_of_priority() -> None:
    scheduler = scheduler_of(max_tokens=8)
    scheduler.add(make(0, 20, priority=1))
    assert step(scheduler) == [[(0, 8, False)]]
    scheduler.add(make(1, 10))
    assert step(scheduler) == [[(0, 8, False)]]  # it runs, and leaves nothing for the other
    assert step(scheduler) == [[(0, 4, True), (1, 4, False)]]
    assert step(scheduler) == [[(0, 1, True), (1, 6, True)]]
    scheduler = scheduler_of(max_tokens=8)
    for request_id, priority in enumerate((1, 0)):
        scheduler.add(make(request_id, 12, priority=priority))
    assert step(scheduler) == [[(1, 8, False)]]
    assert step(scheduler) == [[(1, 4, True), (0, 4, False)]]


def test_a_low_priority_waits_as_long_as_others_come_and_no_longer() -> None:
    scheduler = scheduler_of(max_sequences=1)
    low = make(0, 3, max_new_tokens=1, priority=1)
    scheduler.add(make(1, 3, max_new_tokens=1))
    scheduler.add(low)
    for request_id in range(2, 30):
        scheduler.add(make(request_id, 3, max_new_tokens=1))
        step(scheduler)
    assert low.num_generated == 0
    step(scheduler)
    step(scheduler)
    assert low.finish_reason == "length"


def test_a_step_that_failed_leaves_the_order() -> None:
    scheduler = scheduler_of(max_sequences=3)
    for request_id, priority in enumerate((1, 2, 0)):
        scheduler.add(make(request_id, 3, priority=priority))
    step(scheduler)
    scheduler.add(make(3, 3, priority=1))
    scheduler.start_over()
    scheduler.check()
    assert step(scheduler) == [[(2, 4, True), (0, 4, True), (3, 3, True)]]


def test_a_second_plan_needs_the_first_one_closed() -> None:
    scheduler = scheduler_of()
    scheduler.add(make(0, 3))
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="neither committed nor discarded"):
        scheduler.schedule()
    scheduler.discard(plan)
    with pytest.raises(RuntimeError, match="not the open plan"):
        book(scheduler, plan, {0: [1]})
    assert step(scheduler) == [[(0, 3, True)]]
    assert scheduler.statistics.steps == 1


@pytest.mark.parametrize(
    ("tokens", "counts", "stopped", "failed", "redone"),
    [
        ([], [], [], {}, []),
        ([[1], [1]], [1, 1], [False, False], {}, []),
        ([1], [1], [False], {}, []),
        ([[1]], [1, 1], [False], {}, []),
        ([[1]], [1], [False, True], {}, []),
        ([[1]], [1], [False], {1: "broken"}, []),
        ([[1]], [1], [False], {}, [1]),
        ([[1]], [0], [False], {}, []),
        ([[1, 2]], [2], [False], {}, []),
        ([[1]], [0], [True], {0: "broken"}, []),
    ],
)
def test_tokens_that_do_not_match_the_plan_change_nothing(
    tokens: list[Any], counts: list[int], stopped: list[bool], failed: Any, redone: list[int]
) -> None:
    scheduler = scheduler_of(max_tokens=4)
    scheduler.add(make(0, 3))
    scheduler.add(make(1, 3))  # gets one token of its prompt, so it samples nothing
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="expected"):
        scheduler.commit(
            plan, np.array(tokens), np.array(counts), np.array(stopped), failed, redone
        )
    assert [s.request.num_computed for s in plan.sequences] == [0, 0]
    book(scheduler, plan, {0: [1]})
    assert [s.request.num_computed for s in plan.sequences] == [3, 1]


# The end of a request


def test_the_stop_of_the_last_token_counts_as_stop() -> None:
    scheduler = scheduler_of()
    requests = [make(i, 2, max_new_tokens=1) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    finished = book(scheduler, scheduler.schedule(), {0: [5], 1: [6]}, stopped={1})
    assert finished == requests
    assert [r.finish_reason for r in requests] == ["length", "stop"]
    assert [r.generated_token_ids for r in requests] == [[5], [6]]
    assert scheduler.statistics.finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    assert not scheduler.has_work and free_pages(scheduler) == [100]


@pytest.mark.parametrize(("sizes", "total"), [({"max_context": 9}, 9), ({"num_pages": 4}, 12)])
def test_a_full_context_or_pool_ends_with_length(sizes: dict[str, int], total: int) -> None:
    scheduler = scheduler_of(**sizes)
    request = make(0, 5)
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    assert request.finish_reason == "length"
    assert request.num_tokens == total


def test_abort_works_waiting_running_and_between_schedule_and_commit() -> None:
    scheduler = scheduler_of(max_sequences=2)
    requests = [make(i, 3) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert scheduler.abort(0) is requests[0]
    assert scheduler.abort(3) is requests[3]
    book(scheduler, plan, {1: [8]})
    assert requests[0].finish_reason == "abort" and requests[0].error is None
    assert scheduler.statistics.finished == {"stop": 0, "length": 0, "abort": 2, "error": 0}
    assert requests[0].num_generated == 0 and requests[1].num_generated == 1
    assert step(scheduler) == [[(1, 1, True), (2, 3, True)]]
    assert scheduler.abort(0) is None and scheduler.abort(77) is None
    with pytest.raises(RuntimeError, match="request 0 neither runs nor waits"):
        scheduler.finish(requests[0], "stop")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("pages", [1]), ("row", 3), ("rank", 1), ("arrival", 5), ("rows", None)],
)
def test_check_notices_books_that_do_not_add_up(attribute: str, value: Any) -> None:
    scheduler = scheduler_of(num_ranks=2, max_tokens=32)
    requests = [make(i, 8) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    setattr(requests[0], attribute, value)
    with pytest.raises(RuntimeError):
        scheduler.check()


# A step ahead


def test_the_next_step_is_planned_while_the_tokens_are_not_known() -> None:
    scheduler = scheduler_of(max_tokens=8)
    requests = [make(i, prompt, new) for i, (prompt, new) in enumerate([(3, 9), (2, 1), (7, 9)])]
    for request in requests:
        scheduler.add(request)
    first = scheduler.schedule()
    assert shape(first) == [[(0, 3, True), (1, 2, True), (2, 3, False)]]
    scheduler.advance(first)
    scheduler.check()
    # Request 1 has the one token that it asked for: no row, no pages, and yet to be told.
    assert requests[1].pages == [] and not requests[1].is_finished and scheduler.has_work
    second = scheduler.schedule()
    assert shape(second) == [[(0, 1, True), (2, 4, True)]]
    assert [r.num_generated for r in requests] == [1, 1, 0]
    assert book(scheduler, first, {0: [5], 1: [6]}) == [requests[1]]
    assert [r.generated_token_ids for r in requests] == [[5], [6], []]
    assert requests[1].finish_reason == "length"
    scheduler.advance(second)
    third = scheduler.schedule()
    assert book(scheduler, second, {0: [7], 2: [8]}, stopped={0}) == [requests[0]]
    scheduler.check()
    assert book(scheduler, third, {2: [9]}) == []  # the row of request 0 is dead
    assert [r.generated_token_ids for r in requests] == [[5, 7], [6], [8, 9]]
    assert scheduler.statistics.generated_tokens == 5 and scheduler.statistics.steps == 3


def test_an_abort_takes_back_the_token_that_is_not_known() -> None:
    scheduler = scheduler_of()
    requests = [make(0, 3), make(1, 3, max_new_tokens=1), make(2, 3)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.advance(plan)
    following = scheduler.schedule()
    scheduler.abort(0)
    scheduler.abort(1)
    scheduler.check()
    assert book(scheduler, plan, {2: [4]}) == []
    assert not following.is_dead
    scheduler.abort(2)
    assert following.is_dead
    scheduler.discard(following)
    assert [r.generated_token_ids for r in requests] == [[], [], [4]]
    assert not scheduler.has_work and free_pages(scheduler) == [100]


def test_one_step_ahead_and_no_further() -> None:
    scheduler = scheduler_of()
    scheduler.add(make(0, 3))
    first = scheduler.schedule()
    scheduler.advance(first)
    second = scheduler.schedule()
    for call in (scheduler.advance, lambda plan: book(scheduler, plan, {0: [1]})):
        with pytest.raises(RuntimeError, match="advanced before was not committed"):
            call(second)
    scheduler.start_over()
    scheduler.check()
    assert step(scheduler) == [[(0, 3, True)]]


def test_a_step_that_failed_leaves_all_requests_waiting() -> None:
    """One that runs, one whose last token is not read, one that waits; and one that was over."""
    scheduler = scheduler_of(max_sequences=3)
    requests = [make(0, 3), make(1, 3, max_new_tokens=1), make(2, 3), make(3, 3)]
    for request in requests:
        scheduler.add(request)
    scheduler.advance(scheduler.schedule())
    scheduler.schedule()
    requests[2].finish_reason = "stop"  # interrupted there
    scheduler.start_over()
    scheduler.check()
    assert [r.num_tokens for r in requests[:2]] == [3, 3]
    assert free_pages(scheduler) == [100]
    assert step(scheduler) == [[(0, 3, True), (1, 3, True), (3, 3, True)]]


def test_what_must_preempt_is_not_planned_ahead() -> None:
    scheduler = scheduler_of(num_pages=5)
    scheduler.add(make(0, 4))
    scheduler.add(make(1, 3))
    while not scheduler.must_preempt:
        plan = scheduler.schedule()
        scheduler.advance(plan)
        if scheduler.must_preempt:
            with pytest.raises(RuntimeError, match="must preempt is not planned"):
                scheduler.schedule()
        book(scheduler, plan, {s.request.request_id: [7] for s in plan.sequences if s.samples})
    assert scheduler.statistics.preemptions == 0
    step(scheduler)
    assert scheduler.statistics.preemptions == 1


# Drafts


def drafts(plan: StepPlan) -> list[list[tuple[int, ...]]]:
    return [[s.drafts for s in rank] for rank in plan.ranks]


def decoding(*requests: Request, **sizes: int) -> Scheduler:
    """All requests with their prompts computed."""
    scheduler = scheduler_of(**sizes)
    for request in requests:
        scheduler.add(request)
    while any(request.is_prefill for request in requests):
        step(scheduler)
    return scheduler


def test_drafts_are_accepted_as_far_as_they_are_what_was_sampled() -> None:
    requests = [make(0, 3), make(1, 3)]
    scheduler = decoding(*requests)
    plan = scheduler.schedule(lambda request: [5, 6, 7] if request.request_id == 0 else [])
    assert shape(plan) == [[(0, 4, True), (1, 1, True)]]
    assert plan.sequences[0].token_ids == [7, 5, 6, 7]
    with pytest.raises(ValueError, match=r"expected some of \[5, 6, 7\]"):
        book(scheduler, plan, {0: [5, 7, 1], 1: [3]})
    with pytest.raises(ValueError, match="got 5 tokens of request 0; expected 1 to 4"):
        book(scheduler, plan, {0: [5, 6, 7, 1, 1], 1: [3]})
    with pytest.raises(ValueError, match="sequence 0 stopped without a token"):
        book(scheduler, plan, {0: [], 1: [3]}, {0}, redone=[0])  # by which token?
    book(scheduler, plan, {0: [5, 6, 8], 1: [3]})
    assert [r.generated_token_ids for r in requests] == [[7, 5, 6, 8], [7, 3]]
    assert [r.num_uncomputed for r in requests] == [1, 1]
    assert scheduler.statistics.generated_tokens == 6


def test_a_sequence_with_drafts_may_get_none_and_is_where_it_was() -> None:
    request = make(0, 3)
    scheduler = decoding(request)
    for tokens in ([5], []):
        before = list(request.token_ids)
        plan = scheduler.schedule(lambda request: [5] * 9)
        assert book(scheduler, plan, {0: tokens}, redone=[0] if not tokens else []) == []
        scheduler.check()
        assert request.token_ids == before + tokens and request.num_uncomputed == 1
    plan = scheduler.schedule(lambda request: [5] * 9)
    assert not plan.has_drafts  # from now on: they were in the way
    scheduler.discard(plan)
    plan = scheduler.schedule()
    assert book(scheduler, plan, {0: []}, (), {0: "broken"}) == [request]
    assert (request.finish_reason, request.error) == ("error", "broken")
    assert request.generated_token_ids == [7, 5]


def test_drafts_take_what_budget_room_and_pages_leave() -> None:
    many = [9] * 50
    old, young = make(0, 3), make(1, 3, max_new_tokens=4)
    scheduler = decoding(old, young, max_tokens=10)
    plan = scheduler.schedule(lambda request: many)
    assert [len(s.drafts) for s in plan.sequences] == [8, 0]  # 10 tokens, 2 of them due anyway
    scheduler.discard(plan)
    # Four tokens, of which one is there: two drafts and the one after them.
    plan = scheduler.schedule(lambda request: many if request is young else [])
    assert drafts(plan) == [[(), (9, 9)]]
    book(scheduler, plan, {0: [1], 1: [9, 9, 9]})
    assert young.finish_reason == "length" and young.num_generated == 4
    few = decoding(make(2, 9), make(3, 1), num_pages=8, max_tokens=30)
    assert free_pages(few) == [3]
    plan = few.schedule(lambda request: many)
    # 10 and 2 tokens in 3 pages and 1: the first gets what is to spare, a page beside one for each.
    assert [len(s.drafts) for s in plan.sequences] == [6, 2]
    book(few, plan, {2: [1], 3: [1]})
    assert free_pages(few) == [2]
    full = decoding(make(4, 7), max_context=9)
    assert drafts(full.schedule(lambda request: many)) == [[()]]


def test_drafts_that_are_proposed_are_not_ahead() -> None:
    scheduler = decoding(make(0, 3))
    plan = scheduler.schedule(lambda request: [1, 2])
    scheduler.advance(plan)
    with pytest.raises(RuntimeError, match="drafts are not proposed before the last's commit"):
        scheduler.schedule(lambda request: [1, 2])


def test_beside_prompts_drafts_take_half_of_what_the_other_rows_leave() -> None:
    scheduler = decoding(make(0, 3), make(1, 3), max_drafts=8)
    scheduler.add(make(2, 30))
    plan = scheduler.schedule()
    # 16 tokens, of which 2 are due and 2 are for the other rows.
    assert shape(plan) == [[(0, 7, True), (1, 1, True), (2, 8, False)]]


def test_a_step_ahead_takes_all_drafts_for_right() -> None:
    """It has pages for them, and no more drafts than may follow."""
    request = make(0, 3, max_new_tokens=10)
    scheduler = decoding(request, max_drafts=3)
    first = scheduler.schedule()
    assert shape(first) == [[(0, 4, True)]]
    scheduler.advance(first)
    second = scheduler.schedule()
    # It has 5 tokens now, or up to 8; with these and the drafts it needs 11.
    assert shape(second) == [[(0, 4, True)]] and len(request.pages) == 3
    book(scheduler, first, {0: [5, 6, 7, 8]})
    assert request.num_tokens == 8
    scheduler.advance(second)
    third = scheduler.schedule()
    # Of 13 tokens it has 9, or all but one: no draft may be right then.
    assert shape(third) == [[(0, 1, True)]]
    book(scheduler, second, {0: [9]})
    assert (request.num_tokens, request.finish_reason) == (9, None)
    scheduler.advance(third)
    scheduler.check()


def test_a_token_that_does_not_count_voids_what_follows_it() -> None:
    request, other = make(0, 3), make(1, 3)
    scheduler = decoding(request, other, max_drafts=3)
    first = scheduler.schedule()
    scheduler.advance(first)
    scheduler.rows.stale[:] = False
    second = scheduler.schedule()
    book(scheduler, first, {0: [5], 1: [6]}, redone=[0])
    assert second.is_live.tolist() == [False, True]
    assert scheduler.rows.stale[0].tolist() == [True, False, False, False]
    scheduler.advance(second)
    third = scheduler.schedule()
    assert shape(third) == [[(0, 1, True), (1, 4, True)]]
    book(scheduler, second, {0: [99], 1: [8]})
    assert [request.generated_token_ids, other.generated_token_ids] == [[7, 5], [7, 6, 8]]
    scheduler.advance(third)
    scheduler.check()


def test_drafts_of_no_use_are_made_less_often() -> None:
    scheduler = decoding(make(0, 3, max_new_tokens=300), max_drafts=2, max_context=300)
    counts = []
    for _ in range(100):
        plan = scheduler.schedule()
        counts.append(int(plan.num_drafts[0]))
        book(scheduler, plan, {0: [7]})
    assert (sum(map(bool, counts)) <= 8 and not any(counts[-20:-10])) or not any(counts[-10:])
    while not plan.has_drafts:
        plan = scheduler.schedule()
        book(scheduler, plan, {0: [7, 7, 7] if plan.has_drafts else [7]})
    assert scheduler.schedule().has_drafts


def test_pages_of_rejected_drafts_are_taken_back_before_anything_is_preempted() -> None:
    requests = [make(i, 3) for i in range(2)]
    scheduler = decoding(*requests, max_drafts=6, num_pages=7, page_size=4)
    plan = scheduler.schedule()
    assert [len(request.pages) for request in requests] == [3, 1]
    book(scheduler, plan, {0: [7], 1: [7]})
    while requests[0].num_tokens < 12:
        plan = scheduler.schedule()
        book(scheduler, plan, {0: [7], 1: [7]})
        scheduler.check()
    assert free_pages(scheduler) == [0] and scheduler.statistics.preemptions == 0


# Whole runs


@dataclass(frozen=True)
class Workload:
    sizes: dict[str, int]
    requests: list[tuple[int, int, int]]  # step of arrival, prompt tokens, max_new_tokens
    aborts: list[tuple[int, int]]  # step, request id
    failures: frozenset[int] = frozenset()  # steps whose plan is discarded
    crashes: frozenset[int] = frozenset()  # steps after which all is computed anew
    shared: int = 0  # tokens that all prompts begin with
    prefix_cache: bool = True
    priorities: tuple[int, ...] = ()  # of the requests in turn; none: all have one
    told: int = 0  # every so-many-th request wants log-probabilities of its prompt; 0: none
    deterministic: bool = False
    max_drafts: int = 0
    window: int | None = None

    def priority(self, number: int) -> int:
        return self.priorities[number % len(self.priorities)] if self.priorities else 0

    def make(self) -> tuple[Scheduler, Model, list[Request]]:
        sizes = self.sizes
        model = Model(sizes["num_ranks"], sizes["num_pages"], sizes["page_size"], self.window)
        prompts = enumerate(self.requests)
        requests = [
            make(i, prompt, new, self.shared, self.priority(i)) for i, (_, prompt, new) in prompts
        ]
        for request in requests[:: self.told] if self.told else []:
            request.prompt_logprobs = PromptLogprobs(request.prompt_token_ids, 0)
        options = dict(
            prefix_cache=self.prefix_cache,
            deterministic=self.deterministic,
            max_drafts=self.max_drafts,
            window=self.window,
        )
        return Scheduler(**sizes, **options), model, requests


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    rows = draw(st.integers(1, 4))
    page_size, num_pages = draw(st.integers(1, 4)), draw(st.integers(3, 12))
    context = draw(st.integers(2, 40))
    longest = min(context, (num_pages - 1) * page_size) - 1
    arrivals = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    lengths = st.integers(1, longest)
    return Workload(
        sizes={
            "num_ranks": draw(st.integers(1, 3)),
            "num_pages": num_pages,
            "page_size": page_size,
            "max_sequences": rows,
            "max_tokens": rows + draw(st.integers(0, 8)),
            "max_context": context,
        },
        requests=[(at, draw(lengths), draw(st.integers(1, 25))) for at in sorted(arrivals)],
        aborts=draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 11)), max_size=2)),
        failures=frozenset(draw(st.lists(st.integers(0, 30), max_size=2))),
        crashes=frozenset(draw(st.lists(st.integers(0, 30), max_size=2))),
        shared=draw(st.sampled_from([0, 2, 7, 20])),
        prefix_cache=draw(st.booleans()),
        priorities=tuple(draw(st.lists(st.integers(-2, 2), max_size=4))),
        told=draw(st.integers(0, 2)),
        deterministic=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 12)),
    )


def is_end(token: int) -> bool:
    return token % 29 == 0


def is_bad(token: int) -> bool:
    """Whether the model has no token in this place."""
    return token % 29 == 1


def commit(scheduler: Scheduler, plan: StepPlan, tokens: dict[int, NewTokens]) -> list[Request]:
    """Commit what the model gave. Of a sequence with drafts nothing is no failure yet."""
    counted = {i: new.counted for i, new in tokens.items()}
    stopped = {i for i, new in counted.items() if new and is_end(new[-1])}
    redone = [i for i, new in tokens.items() if i not in stopped and new.is_redone]
    failed = {i: "no token" for i, new in counted.items() if not new and i not in redone}
    return book(scheduler, plan, counted, stopped, failed, redone)


def expected_tokens(
    request: Request, limit: int, window: int | None = None
) -> tuple[list[int], str]:
    tokens = list(request.prompt_token_ids)
    while True:
        token = next_token(seen(tokens, window))
        if is_bad(token):
            return tokens, "error"
        tokens.append(token)
        if is_end(token):
            return tokens, "stop"
        generated = len(tokens) - len(request.prompt_token_ids)
        if generated == request.params.max_new_tokens or len(tokens) == limit:
            return tokens, "length"


def check_plan(plan: StepPlan, load: Workload, decoding: list[Request]) -> None:
    sizes = load.sizes
    assert max(plan.num_tokens) <= sizes["max_tokens"]
    for index, sequences in enumerate(plan.ranks):
        assert len(sequences) <= sizes["max_sequences"]
        kinds = [s.request.is_prefill for s in sequences]
        assert kinds == sorted(kinds)
        for s in sequences:
            known, room = s.request.num_uncomputed, len(s.request.pages) * sizes["page_size"]
            given = s.num_tokens - len(s.drafts)
            assert 1 <= given <= known and s.samples == (given == known)
            assert s.request.num_computed + s.num_tokens <= room and s.request.rank == index
    planned = [s.request for s in plan.sequences]
    assert len(set(planned)) == len(planned)
    for s in plan.sequences if load.deterministic else ():
        left = s.request.num_prompt_left
        assert (s.num_tokens, left) == (1, 0) if plan.with_decodes else s.num_tokens <= left
    for request in decoding if plan.with_decodes else ():
        # None waits for a prefill beside it: it is in, or it lost its pages.
        assert request in planned or request.num_computed == 0


def check_order(scheduler: Scheduler, plan: StepPlan, were_off: list[Request]) -> None:
    """The first on each rank moves on, and nothing was admitted before one that waits."""
    planned = {s.request for s in plan.sequences}
    for rank in scheduler._ranks:
        alone = scheduler._deterministic  # of prompts and decodes only one kind is in a step
        assert not rank.running or alone or rank.running[0] in planned
        if rank.running:
            assert rank.running[0] is min(rank.running, key=turn_of)
    admitted = [r for r in were_off if r.rank is not None]
    waiting = list(scheduler._waiting)
    assert (
        not admitted
        or not waiting
        or turn_of(max(admitted, key=turn_of)) < min(map(turn_of, waiting))
    )


def tell_prompts(chunks: list[PromptChunk]) -> None:
    """What a step told of prompts: as a stand-in the tokens themselves."""
    for chunk in chunks:
        if chunk.request.is_finished:
            continue
        assert chunk.request.prompt_logprobs is not None
        after = slice(chunk.tokens.start + 1, chunk.tokens.stop + 1)
        rows = np.array([[i, 1] for i in chunk.request.prompt_token_ids[after]], np.int32)
        chunk.request.prompt_logprobs.put(chunk.tokens.start, rows)


def check_told(request: Request) -> None:
    """Of each token once, and of all if it was not ended before."""
    told, prompt = request.prompt_logprobs, request.prompt_token_ids
    if told is None:
        return
    assert told.is_whole or request.finish_reason == "abort"
    known = told.read()
    assert known[0] is None and len(known) == told.num_told + 1
    values = [np.float32(one.logprob).view(np.int32) for one in known[1:] if one is not None]
    assert values == list(prompt[1 : len(known)])
    assert [one.token_id for one in known[1:] if one is not None] == values


def guess(token_ids: list[int], most: int | None = None, window: int | None = None) -> list[int]:
    """Drafts that are right up to some place, of a number that changes."""
    rng = random.Random(repr(token_ids))
    ids, count, right = list(token_ids), rng.randrange(5), rng.randrange(5)
    for _ in range(right):
        ids.append(next_token(seen(ids, window)))
    drafts = [*ids[len(token_ids) :], *[1] * 40]
    return drafts[: count if most is None else most]


def simulate_drafts(load: Workload) -> tuple[Scheduler, list[Request]]:
    """Decodes verify drafts, right and wrong ones, which the host proposes."""
    return simulate(replace(load, deterministic=False), propose=True)


def simulate_drafts_ahead(load: Workload) -> tuple[Scheduler, list[Request]]:
    """Decodes verify drafts of the device, while steps run ahead."""
    return simulate_ahead(replace(load, deterministic=False, max_drafts=3))


def simulate(load: Workload, propose: bool = False) -> tuple[Scheduler, list[Request]]:
    scheduler, model, requests = load.make()
    admitted: set[int] = set()
    waited: list[int] = []  # the oldest, where the step before was of the other kind
    now = 0
    while scheduler.has_work or now <= load.requests[-1][0]:
        for request, (at, _, _) in zip(requests, load.requests, strict=True):
            if at == now:
                scheduler.add(request)
        for at, request_id in load.aborts:
            if at == now:
                scheduler.abort(request_id)
        decoding = [r for r in requests if r.rank is not None and not r.is_prefill]
        were_off = [r for r in requests if r.rank is None]
        plan = scheduler.schedule(
            (lambda r: guess(r.token_ids, window=load.window)) if propose else None
        )
        scheduler.check()
        check_plan(plan, load, decoding)
        check_order(scheduler, plan, were_off)
        if len(set(load.priorities)) < 2:
            planned = {s.request.request_id for s in plan.sequences}
            unfinished = [
                r.request_id for r in requests if r.arrival is not None and not r.is_finished
            ]
            waits = [oldest for oldest in unfinished[:1] if oldest not in planned]
            assert not waits or (load.deterministic and waits != waited), "the oldest must advance"
            waited = waits
            admitted |= {r.request_id for r in requests if r.rank is not None}
            skipped = [i for i in range(max(admitted, default=0)) if i not in admitted]
            assert all(requests[i].is_finished for i in skipped), "admission out of order"
        if now in load.failures:
            scheduler.discard(plan)
        elif now in load.crashes:
            scheduler.start_over()
        else:
            model.tell(scheduler, plan)
            tell_prompts(prompt_chunks(plan))
            tokens = model.run(plan)
            running = [r for r in requests if r.rank is not None]
            finished = commit(scheduler, plan, tokens)
            assert {r for r in running if r.rank is None} == set(finished)
        scheduler.check()
        now += 1
        assert now < 5000
    return scheduler, requests


def simulate_ahead(load: Workload) -> tuple[Scheduler, list[Request]]:
    """Each step is run before the tokens of the one before are committed, unless it preempts."""
    scheduler, model, requests = load.make()

    def dispatch(before: Dispatched | None = None, fails: bool = False) -> Dispatched | None:
        decoding = [r for r in requests if r.rank is not None and not r.is_prefill]
        were_off = [r for r in requests if r.rank is None]
        plan = scheduler.schedule()
        scheduler.check()
        check_plan(plan, load, decoding)
        check_order(scheduler, plan, were_off)
        if plan.sequences and not fails:
            model.tell(scheduler, plan)
            return Dispatched(plan, model.run(plan, before), prompt_chunks(plan))
        scheduler.discard(plan)
        return None

    now, step = 0, None
    while scheduler.has_work or now <= load.requests[-1][0]:
        for request, (at, _, _) in zip(requests, load.requests, strict=True):
            if at == now:
                scheduler.add(request)
        for at, request_id in load.aborts:
            if at == now:
                scheduler.abort(request_id)
        step, following = step or dispatch(), None
        if step is not None:
            scheduler.advance(step.plan)
            scheduler.check()
            if not scheduler.must_preempt:
                following = dispatch(step, now in load.failures)
            if now in load.crashes:
                scheduler.start_over()
                following = None
            else:
                tell_prompts(step.chunks)
                commit(scheduler, step.plan, step.tokens)
            scheduler.check()
        if following is not None and following.plan.is_dead:
            scheduler.discard(following.plan)
            following = None
        step = following
        now += 1
        assert now < 5000
    return scheduler, requests


RUNS = [simulate, simulate_ahead, simulate_drafts, simulate_drafts_ahead]


@settings(max_examples=300, deadline=None)
@given(workloads(), st.sampled_from(RUNS))
def test_every_request_finishes_with_exactly_its_tokens(load: Workload, run: Any) -> None:
    scheduler, requests = run(load)
    sizes = load.sizes
    limit = min(sizes["max_context"], (sizes["num_pages"] - 1) * sizes["page_size"])
    for request in requests:
        tokens, reason = expected_tokens(request, limit, load.window)
        if request.finish_reason == "abort":
            assert request.request_id in {i for _, i in load.aborts}
            assert request.token_ids == tokens[: request.num_tokens]
        else:
            assert (request.token_ids, request.finish_reason) == (tokens, reason)
            assert request.error == ("no token" if reason == "error" else None)
        assert request.rank is None and request.pages == []
        check_told(request)
    assert free_pages(scheduler) == [sizes["num_pages"] - 1] * sizes["num_ranks"]
    statistics = scheduler.statistics
    assert statistics.generated_tokens == sum(r.num_generated for r in requests)
    assert statistics.preemptions == sum(r.num_preemptions for r in requests)
    found = sum(r.num_cached for r in requests)
    assert found <= statistics.cached_tokens and (load.prefix_cache or not statistics.cached_tokens)
    assert sum(statistics.finished.values()) == len(requests)


def test_pages_before_the_window_are_given_up() -> None:
    """And stay there to be found, until their place is needed."""
    request = make(0, 40, max_new_tokens=20)
    scheduler = scheduler_of(window=8, max_tokens=40)
    scheduler.add(request)
    step(scheduler)
    for _ in range(12):
        step(scheduler)
    # When it got its 13th page it had 49 tokens. The last saw those from the 42nd on, of the 11th
    # page; two more stay.
    assert request.num_tokens == 53 and request.num_dropped == 8
    assert request.pages[:8] == [0] * 8 and free_pages(scheduler) == [100 - 5]
    other = make(0, 40)
    other.request_id = 1
    scheduler.add(other)
    plan = scheduler.schedule()
    assert shape(plan) == [[(0, 1, True), (1, 4, True)]] and other.num_cached == 36
    book(scheduler, plan, {0: [7], 1: [7]})
    scheduler.check()


def test_a_request_longer_than_the_others_leave_room_for_is_not_preempted_within_a_window() -> None:
    requests = [make(i, 3, max_new_tokens=60) for i in range(2)]
    scheduler = scheduler_of(num_pages=17, window=4, max_context=64)
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.statistics.preemptions == 0  # 2 x 16 pages would not fit


@pytest.mark.parametrize("priorities", [(), (0, 2, -1, 1)], ids=["equal", "priorities"])
@pytest.mark.parametrize("run", RUNS)
def test_a_crowded_pool_preempts_and_still_serves_all(
    run: Any, priorities: tuple[int, ...]
) -> None:
    sizes = {"num_ranks": 2, "num_pages": 9, "page_size": 2, "max_sequences": 4}
    sizes |= {"max_tokens": 6, "max_context": 16}
    load = Workload(sizes, [(i % 3, 1 + i % 5, 15) for i in range(3)] * 8, [])
    load = Workload(sizes, sorted(load.requests), [], priorities=priorities)
    scheduler, requests = run(load)
    assert scheduler.statistics.preemptions > 5
    assert all(r.token_ids == expected_tokens(r, 16)[0] for r in requests)

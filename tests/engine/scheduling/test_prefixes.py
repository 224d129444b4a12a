"""Pages that are kept: found by their tokens, shared, given up in order, and never wrong."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from tbo_jax.engine.scheduling.limits import Limits
from tbo_jax.engine.scheduling.pages import PageAllocator
from tbo_jax.engine.scheduling.placement import choose_rank
from tbo_jax.engine.scheduling.prefixes import PrefixIndex
from tbo_jax.engine.scheduling.rank import Rank
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.scheduling.rows import Rows
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.sampling.params import SamplingParams
from tests.engine.scheduling.test_scheduler import (
    RUNS,
    Workload,
    book,
    drafts,
    expected_tokens,
    free_pages,
    scheduler_of,
    shape,
    step,
)

EQUAL_HASH = sys.hash_info.modulus  # hash(n) == hash(n + this), for small n


def kept(allocator: PageAllocator, *blocks: tuple[int, ...], salt: str = "") -> list[int]:
    """Pages in use of one text, all kept."""
    pages = allocator.allocate(len(blocks))
    assert pages is not None
    for at, block in enumerate(blocks):
        pages[at] = allocator.keep(pages[at], pages[at - 1] if at else salt, block)
    return pages


# Pages


def test_kept_pages_are_found_by_what_is_in_them_and_before_them() -> None:
    allocator = PageAllocator(9)
    first, second = kept(allocator, (1, 2), (3, 4))
    assert allocator.find("", (1, 2)) == first and allocator.find(first, (3, 4)) == second
    assert allocator.find("", (3, 4)) is None and allocator.find("salt", (1, 2)) is None
    allocator.free([first, second])
    assert allocator.num_free == 8 and allocator.is_idle(first)
    allocator.share([first, second])
    assert allocator.num_free == 6 and not allocator.is_idle(first)
    allocator.check([[first, second]])


def test_equal_hashes_are_no_equal_tokens() -> None:
    allocator = PageAllocator(9)
    block, other = (5, 7), (5 + EQUAL_HASH, 7)
    assert hash(block) == hash(other)
    (page,) = kept(allocator, block)
    assert allocator.find("", other) is None
    (another,) = kept(allocator, other)
    assert allocator.find("", block) == page != another == allocator.find("", other)


def test_a_second_page_of_the_same_tokens_is_given_up_for_the_first() -> None:
    allocator = PageAllocator(9)
    first = kept(allocator, (1,), (2,))
    second = kept(allocator, (1,), (2,), (3,))
    assert second[:2] == first and allocator.num_free == 5
    allocator.check([first, second])
    allocator.free(first)
    assert allocator.num_free == 5
    allocator.free(second)
    assert allocator.num_free == 8


def test_the_ends_of_the_texts_that_ended_first_give_way_first() -> None:
    allocator = PageAllocator(8)
    old = kept(allocator, (1,), (2,), (3,))
    new = kept(allocator, (4,), (5,))
    allocator.free(old)
    allocator.free(new)
    assert allocator.allocate(3) is not None and allocator.num_evicted == 1
    assert [allocator.is_idle(page) for page in [*old, *new]] == [True, True, False, True, True]
    allocator.share(old[:2])  # used again, and with that the youngest
    allocator.free(old[:2])
    assert allocator.allocate(2) is not None
    assert [allocator.is_idle(page) for page in old[:2]] == [True, True]
    assert allocator.allocate(1) == [old[1]] and allocator.allocate(1) == [old[0]]
    assert allocator.allocate(1) is None and allocator.num_evicted == 5


def test_a_page_in_use_never_gives_way() -> None:
    allocator = PageAllocator(4)
    used = kept(allocator, (1,), (2,))
    assert allocator.allocate(2) is None
    assert allocator.allocate(1) is not None and allocator.num_free == 0
    assert allocator.find(used[0], (2,)) == used[1]


def test_what_is_forgotten_is_not_found_nor_what_follows_it() -> None:
    allocator = PageAllocator(9)
    text = kept(allocator, (1,), (2,), (3,))
    branch = kept(allocator, (1,), (4,))
    used = kept(allocator, (5,))
    allocator.free(text)
    allocator.free(branch)
    allocator.forget([text[1], used[0]])
    assert [allocator.is_kept(page) for page in text] == [True, False, False]
    assert allocator.is_kept(branch[1]) and allocator.find("", (5,)) == used[0]
    allocator.check([used])
    allocator.forget([text[0]])
    assert not allocator.is_kept(branch[1]) and allocator.num_free == 7
    allocator.check([used])


def test_only_a_kept_page_is_shared() -> None:
    allocator = PageAllocator(4)
    (page,) = allocator.allocate(1) or []
    with pytest.raises(RuntimeError, match=f"page {page} is shared and not kept"):
        allocator.share([page])


def lose_user(allocator: PageAllocator) -> None:
    allocator._users[1] -= 1


def idle_in_use(allocator: PageAllocator) -> None:
    allocator._idle[1] = None


def wrong_order(allocator: PageAllocator) -> None:
    allocator._idle.move_to_end(4)


def lose_first(allocator: PageAllocator) -> None:
    allocator._kept.remove(1)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_user, "page 1 has 2 owners and is counted 1 times"),
        (idle_in_use, "page 1 is owned and idle"),
        (wrong_order, "page 4 outlasts page 3 before it"),
        (lose_first, "page 1 is owned twice"),
    ],
)
def test_check_names_what_does_not_add_up(harm: Any, message: str) -> None:
    allocator = PageAllocator(6)
    shared = kept(allocator, (1,), (2,))
    ended = kept(allocator, (3,), (4,))
    assert [*shared, *ended] == [1, 2, 3, 4]
    allocator.share(shared)
    allocator.free(ended)
    allocator.check([shared, shared])
    harm(allocator)
    with pytest.raises(RuntimeError, match=message):
        allocator.check([shared, shared])


def test_an_index_refuses_a_page_or_a_key_twice() -> None:
    index = PrefixIndex()
    index.add(1, "", (1,))
    for page, block in (1, (2,)), (2, (1,)):
        with pytest.raises(RuntimeError, match=f"page {page} or what it holds after '' is here"):
            index.add(page, "", block)
    assert len(index) == 1
    index.add(2, 3, (1,))
    with pytest.raises(RuntimeError, match="page 2 follows page 3"):
        index.check()


@dataclass
class Text:
    tokens: list[int]
    salt: str
    pages: list[int] = field(default_factory=list)
    computed: int = 0


class Books:
    """Random texts in random order on a pool, whose pages remember what was written to them."""

    SIZE = 2

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.allocator = PageAllocator(self.chance.randint(2, 40))
        self.held: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.texts: list[Text] = []
        self.found = 0

    def after(self, text: Text, at: int) -> int | str:
        return text.pages[at - 1] if at else text.salt

    def block(self, text: Text, at: int) -> tuple[int, ...]:
        return tuple(text.tokens[at * self.SIZE : (at + 1) * self.SIZE])

    def content(self, text: Text, at: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(text.salt, self.block(text, i)) for i in range(at + 1)]

    def begin(self) -> None:
        pick = self.chance.choice
        tokens = [pick((0, 1, EQUAL_HASH)) for _ in range(self.chance.randint(1, 12))]
        text = Text(tokens, pick(("", "", "salt")))
        full = len(tokens) // self.SIZE
        while len(text.pages) < full:
            at = len(text.pages)
            page = self.allocator.find(self.after(text, at), self.block(text, at))
            if page is None:
                break
            assert self.held[page] == self.content(text, at), "a wrong hit"
            text.pages.append(page)
        self.allocator.share(text.pages)
        self.found += len(text.pages)
        text.computed = len(text.pages)
        rest = self.allocator.allocate(full - len(text.pages))
        if rest is None:
            self.allocator.free(text.pages)
            return
        for page in rest:  # whoever writes to a page does away with what it held
            self.held.pop(page, None)
        text.pages += rest
        self.texts.append(text)

    def compute(self) -> None:
        text = self.chance.choice(self.texts)
        for at in range(text.computed, self.chance.randint(text.computed, len(text.pages))):
            self.held[text.pages[at]] = self.content(text, at)
            text.pages[at] = self.allocator.keep(
                text.pages[at], self.after(text, at), self.block(text, at)
            )
            assert self.held[text.pages[at]] == self.content(text, at), "a wrong page instead"
            text.computed = at + 1

    def end(self) -> None:
        text = self.texts.pop(self.chance.randrange(len(self.texts)))
        self.allocator.free(text.pages)
        if self.chance.random() < 0.05:
            self.allocator.forget(text.pages[: self.chance.randint(0, text.computed)])

    def run(self, operations: int, check_every: int) -> None:
        for count in range(operations):
            kind = self.chance.random()
            if not self.texts or kind < 0.35:
                self.begin()
            elif kind < 0.65:
                self.compute()
            else:
                self.end()
            if count % check_every == 0:
                self.allocator.check([text.pages for text in self.texts])
        while self.texts:
            self.end()
        self.allocator.check([])
        assert self.allocator.num_free == self.allocator.capacity


def test_random_operations_lose_no_page_and_find_no_wrong_one() -> None:
    found = evicted = 0
    for seed in range(40):
        books = Books(seed)
        books.run(300, check_every=1)
        found += books.found
        evicted += books.allocator.num_evicted
    assert found > 1000 and evicted > 1000


@pytest.mark.slow
def test_a_million_random_operations_lose_no_page_and_find_no_wrong_one() -> None:
    for seed in range(100, 200):
        books = Books(seed)
        books.run(10_000, check_every=50)
        assert books.found > 100


# Requests


def request(number: int, *ids: int, new: int = 100, salt: str = "") -> Request:
    return Request(number, ids, SamplingParams(max_new_tokens=new), salt)


def one_by_one(**sizes: int) -> Scheduler:
    return scheduler_of(max_tokens=64, **sizes)


def test_a_prompt_that_begins_alike_computes_the_rest() -> None:
    scheduler = one_by_one()
    first, second = request(0, *range(10)), request(1, *range(9), 70, 71)
    scheduler.add(first)
    assert step(scheduler) == [[(0, 10, True)]]
    scheduler.add(second)
    assert step(scheduler) == [[(0, 1, True), (1, 3, True)]]
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert (first.num_cached, second.num_cached) == (0, 8)
    assert scheduler.statistics.cached_tokens == 8 and scheduler.statistics.prefill_tokens == 13


def test_generated_tokens_are_found_too() -> None:
    scheduler = one_by_one()
    first = request(0, 1, 2, 3, new=6)  # each of them a 7
    scheduler.add(first)
    while scheduler.has_work:
        step(scheduler)
    assert first.num_tokens == 9
    scheduler.add(request(1, *first.token_ids, 50))
    assert step(scheduler) == [[(1, 2, True)]]  # the last one was never computed


@pytest.mark.parametrize("length", [8, 9])
def test_a_prompt_that_is_all_there_computes_its_last_page_into_one_of_its_own(length: int) -> None:
    scheduler = one_by_one()
    requests = [request(i, *range(length)) for i in range(2)]
    scheduler.add(requests[0])
    step(scheduler)
    scheduler.add(requests[1])
    plan = scheduler.schedule()
    assert shape(plan) == [[(0, 1, True), (1, 4 if length == 8 else 1, True)]]
    own = requests[1].pages[(length - 1) // 4 :]
    assert not set(own) & set(requests[0].pages)
    book(scheduler, plan, {0: [7], 1: [7]})
    scheduler.check()
    assert requests[1].pages[:2] == requests[0].pages[:2]  # given up for the one that was there


def test_a_salt_keeps_apart() -> None:
    scheduler = one_by_one()
    for number, salt in enumerate(["", "mine", "mine", "yours", ""]):
        scheduler.add(request(number, *range(9), new=1, salt=salt))
        (((_, computed, _),),) = step(scheduler)
        assert computed == (1 if number in (2, 4) else 9)


def test_those_that_begin_alike_in_one_step_compute_it_once() -> None:
    scheduler = one_by_one()
    group = [request(i, *range(8), 50 + i // 2) for i in range(4)]
    for each in group:
        scheduler.add(each)
    assert step(scheduler) == [[(0, 9, True)]]
    assert [len(each.pages) for each in group] == [3] * 4
    assert step(scheduler) == [[(0, 1, True), (1, 1, True), (2, 1, True), (3, 1, True)]]
    assert all(each.pages[:2] == group[0].pages[:2] for each in group)
    assert free_pages(scheduler) == [100 - 2 - 4]
    assert [each.num_cached for each in group] == [0, 8, 8, 8]


def test_a_long_prompt_is_taken_over_chunk_by_chunk() -> None:
    scheduler = scheduler_of(max_tokens=10)
    requests = [request(number, *range(16), 50 + number) for number in range(2)]
    for each in requests:
        scheduler.add(each)
    assert step(scheduler) == [[(0, 10, False)]]
    # There is room for three tokens more, and the second one is at the page that the first is at.
    assert step(scheduler) == [[(0, 7, True)]]
    assert requests[1].num_cached == 8
    assert step(scheduler) == [[(0, 1, True), (1, 1, True)]]
    assert requests[1].num_cached == scheduler.statistics.cached_tokens == 16


def test_who_waited_once_waits_again_for_another_one() -> None:
    scheduler = one_by_one()
    for number, shared in enumerate((8, 16, 16)):
        scheduler.add(request(number, *range(shared), 50 + number))
    assert step(scheduler) == [[(0, 9, True)]]
    assert step(scheduler) == [[(0, 1, True), (1, 9, True)]]
    assert step(scheduler) == [[(0, 1, True), (1, 1, True), (2, 1, True)]]


def test_who_waited_goes_on_alone_when_the_other_one_is_gone() -> None:
    scheduler = scheduler_of(max_tokens=6)
    requests = [request(number, *range(16)) for number in range(3)]
    for each in requests:
        scheduler.add(each)
    assert step(scheduler) == [[(0, 6, False)]]
    scheduler.abort(0)
    # Its full page is there still, and what it had begun is not.
    assert step(scheduler) == [[(1, 6, False)]]
    assert requests[1].num_cached == 4
    scheduler.check()


def test_a_page_is_found_when_the_step_that_fills_it_is_on_its_way() -> None:
    """Not in that step, and not before it: of micro-batches one would read what another writes."""
    scheduler = one_by_one()
    first, second = request(0, *range(9)), request(1, *range(9))
    scheduler.add(first)
    plan = scheduler.schedule()
    rank = scheduler._ranks[0]
    assert rank.find(second) == []
    scheduler.add(second)
    scheduler.advance(plan)
    assert rank.find(second) == first.pages[:2]
    ahead = scheduler.schedule()
    assert shape(ahead) == [[(0, 1, True), (1, 1, True)]]
    book(scheduler, plan, {0: [7]})
    scheduler.advance(ahead)
    book(scheduler, ahead, {0: [7], 1: [7]})
    scheduler.check()


def test_a_plan_that_was_dropped_leaves_nothing_to_be_found() -> None:
    scheduler = one_by_one()
    scheduler.add(request(0, *range(9)))
    scheduler.discard(scheduler.schedule())
    scheduler.abort(0)
    scheduler.add(request(1, *range(9)))
    assert step(scheduler) == [[(1, 9, True)]]


def test_a_failed_step_and_other_weights_leave_nothing_to_be_found() -> None:
    scheduler = one_by_one()
    scheduler.add(request(0, *range(9)))
    step(scheduler)
    scheduler.start_over()
    assert step(scheduler) == [[(0, 10, True)]]
    with pytest.raises(RuntimeError, match="1 requests are unfinished, and use their pages"):
        scheduler.forget_pages()
    scheduler.abort(0)
    scheduler.forget_pages()
    scheduler.add(request(1, *range(9)))
    assert step(scheduler) == [[(1, 9, True)]]


@pytest.mark.parametrize("length", [8, 9])
def test_pages_of_a_request_that_failed_are_not_found(length: int) -> None:
    """But for those that another one uses, which had them before."""
    scheduler = one_by_one()
    scheduler.add(request(0, *range(4), 60))
    step(scheduler)
    scheduler.add(request(1, *range(length)))
    book(scheduler, scheduler.schedule(), {0: [7], 1: []}, failed={1: "not finite"})
    scheduler.check()
    scheduler.add(request(2, *range(length)))
    assert step(scheduler) == [[(0, 1, True), (2, length - 4, True)]]


def test_the_token_before_rejected_drafts_may_be_computed_again_before_its_page_is_kept() -> None:
    scheduler = one_by_one()
    first = request(0, 1, 2, 3)
    scheduler.add(first)
    step(scheduler)
    plan = scheduler.schedule(lambda _: [5, 5])
    assert drafts(plan) == [[(5, 5)]]
    book(
        scheduler, plan, {0: []}, redone=[0]
    )  # nothing stood: its fourth token is computed once more
    assert first.num_computed == 3 and not scheduler._ranks[0].pages.is_kept(first.pages[0])
    scheduler.check()
    plan = scheduler.schedule(lambda _: [5, 5])
    book(scheduler, plan, {0: [5]})
    assert first.num_computed == 4 and scheduler._ranks[0].pages.is_kept(first.pages[0])
    scheduler.check()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    scheduler = one_by_one(prefix_cache=False)
    for number in range(3):
        scheduler.add(request(number, *range(9), new=1))
    assert step(scheduler) == [[(0, 9, True), (1, 9, True), (2, 9, True)]]
    scheduler.add(request(3, *range(9), new=1))
    assert step(scheduler) == [[(3, 9, True)]]
    assert scheduler.statistics.cached_tokens == 0


def test_check_notices_a_request_that_would_write_to_a_kept_page() -> None:
    scheduler = scheduler_of()
    first, second = request(0, *range(9)), request(1, *range(90, 103))
    for each in (first, second):
        scheduler.add(each)
    step(scheduler)
    scheduler.check()
    assert second.computed == 7 and scheduler._ranks[0].pages.is_kept(second.pages[0])
    second.computed = 3
    with pytest.raises(RuntimeError, match="can be found, and .* writes to it"):
        scheduler.check()
    second.computed = 7
    first.token_ids[2] = 99
    with pytest.raises(RuntimeError, match="is found by other tokens than those of"):
        scheduler.check()


# Ranks


def ranks_with(*prompts: tuple[int, ...], rows: int = 8) -> list[Rank]:
    """Each has run a request of this prompt, and holds its pages."""
    held = Rows(len(prompts), Limits(4, 101, rows, 64, 64))
    ranks = [Rank(index, held, keeps_pages=True) for index in range(len(prompts))]
    for rank, prompt in zip(ranks, prompts, strict=True):
        occupy(rank, *prompt)
        if prompt:
            rank.release(rank.running[0])
    return ranks


def occupy(rank: Rank, *prompt: int, computed: bool = True) -> None:
    if prompt:
        running = request(0, *prompt)
        running.arrival = 0
        rank.place(running, rank.find(running))
        if computed:
            running.computed = len(prompt)
            running.known.append(7)
            rank.keep(running)
            rank.decode(running)


def chosen(ranks: list[Rank], wanted: Request) -> int:
    choice = choose_rank(ranks, wanted)
    assert choice is not None
    return choice[0].index


def test_the_rank_that_holds_most_gets_the_request() -> None:
    ranks = ranks_with((), tuple(range(5)), tuple(range(13)), tuple(range(50, 59)))
    assert chosen(ranks, request(1, *range(20))) == 2
    assert chosen(ranks, request(1, *range(5), *range(90, 99))) == 1
    assert chosen(ranks, request(1, *range(50, 60))) == 3
    assert chosen(ranks, request(1, 99, 98)) == 0
    assert chosen(ranks, request(1, *range(20), salt="other")) == 0


def test_a_rank_that_is_ahead_of_the_others_gets_no_more_for_what_it_holds() -> None:
    ranks = ranks_with(tuple(range(41)), (), rows=16)
    places = []
    for number in range(8):
        wanted = request(number, *range(40), 60 + number)
        wanted.arrival = number
        choice = choose_rank(ranks, wanted)
        assert choice is not None
        rank, found = choice
        rank.place(wanted, found)
        places.append(rank.index)
    rows = [len(rank.running) for rank in ranks]
    assert places[:2] == [0, 0] and abs(rows[0] - rows[1]) <= 2 and sum(rows) == 8


def test_what_a_rank_has_to_compute_first_counts_against_what_it_holds() -> None:
    ranks = ranks_with(tuple(range(21)), (), rows=16)
    wanted = request(1, *range(30))
    occupy(ranks[0], *range(200, 219), computed=False)
    assert chosen(ranks, wanted) == 0  # 20 tokens are there, 19 come before
    occupy(ranks[0], *range(300, 302), computed=False)
    assert chosen(ranks, wanted) == 1


def test_a_rank_without_room_is_passed_over_whatever_it_holds() -> None:
    ranks = ranks_with(tuple(range(41)), ())
    occupy(ranks[0], *range(1000, 1380))
    occupy(ranks[1], *range(1000, 1300))
    assert chosen(ranks, request(1, *range(50))) == 1
    occupy(ranks[1], *range(2000, 2090))
    assert choose_rank(ranks, request(1, *range(50))) is None


def test_a_group_that_begins_alike_spreads_over_the_ranks() -> None:
    scheduler = scheduler_of(num_ranks=4, max_sequences=16, max_tokens=64, max_context=128)
    group = [request(i, *range(48), 50 + i) for i in range(32)]
    for each in group:
        scheduler.add(each)
        step(scheduler)
    rows = [len(rank.running) for rank in scheduler._ranks]
    assert sum(rows) == 32 and max(rows) - min(rows) <= 3
    assert scheduler.statistics.cached_tokens == 28 * 48  # each rank computes it once


# Whole runs


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_crowded_pool_of_texts_that_begin_alike_gives_the_same_tokens(
    run: Any, prefix_cache: bool
) -> None:
    sizes = {"num_ranks": 2, "num_pages": 11, "page_size": 2, "max_sequences": 4}
    sizes |= {"max_tokens": 6, "max_context": 19}
    requests = sorted((i % 20, 3 + i % 11, 12) for i in range(40))
    load = Workload(sizes, requests, [], shared=6, prefix_cache=prefix_cache)
    scheduler, found = run(load)
    assert all(r.token_ids == expected_tokens(r, 19)[0] for r in found)
    statistics = scheduler.statistics
    assert statistics.preemptions > 5
    assert (statistics.cached_tokens > 100) == prefix_cache == (statistics.evictions > 50)
    if prefix_cache:
        for rank in scheduler._ranks:
            assert rank.pages.num_free == 10 and rank.pages._idle

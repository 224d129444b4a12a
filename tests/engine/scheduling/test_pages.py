from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbo_jax.engine.scheduling.pages import PageAllocator


def test_page_zero_is_never_handed_out() -> None:
    pages = PageAllocator(5).allocate(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]


def test_allocation_is_never_partial() -> None:
    allocator = PageAllocator(5)
    assert allocator.allocate(5) is None
    assert allocator.num_free == allocator.capacity == 4
    assert allocator.allocate(0) == []


def test_pages_that_were_freed_last_come_first_in_their_order() -> None:
    allocator = PageAllocator(9)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert first is not None and second is not None
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(5) == [*second, *first]


@pytest.mark.parametrize("num_pages", [1, 0, -3])
def test_a_pool_needs_a_page_besides_padding(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages is {num_pages}; expected 2 or more"):
        PageAllocator(num_pages)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="asked for -1 pages"):
        PageAllocator(3).allocate(-1)


@pytest.mark.parametrize("bad", [[1, 3], [1, 1], [1, 0], [1, 9], [1, -1]])
def test_freeing_a_page_not_in_use_changes_nothing(bad: list[int]) -> None:
    allocator = PageAllocator(9)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(RuntimeError, match=f"page {bad[1]} freed"):
        allocator.free(bad)
    assert allocator.num_free == 6
    allocator.check([[1, 2]])


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([[1, 2], [2]], "page 2 is owned twice"),
        ([[1, 1, 2]], "page 1 is owned twice"),
        ([[1, 2], [3]], "page 3 is owned and free"),
        ([[1]], "page 2 is neither owned nor free"),
        ([[1, 2], [0]], "page 0 is owned"),
        ([[1, 2], [6]], "page 6 is owned"),
    ],
)
def test_check_names_the_page_that_does_not_add_up(owned: list[list[int]], message: str) -> None:
    allocator = PageAllocator(6)
    allocator.allocate(2)
    allocator.check([[2], [1]])
    with pytest.raises(RuntimeError, match=message):
        allocator.check(owned)


@given(st.integers(2, 30), st.integers(0, 2**32), st.lists(st.integers(0, 12), max_size=60))
def test_pages_are_disjoint_and_none_is_lost(num_pages: int, seed: int, sizes: list[int]) -> None:
    allocator, chance = PageAllocator(num_pages), random.Random(seed)
    owned: list[list[int]] = []
    for size in sizes:
        if owned and chance.random() < 0.5:
            allocator.free(owned.pop(chance.randrange(len(owned))))
        room = num_pages - 1 - sum(map(len, owned))
        pages = allocator.allocate(size)
        assert (pages is None) == (size > room)
        if pages is not None:
            assert len(pages) == size
            owned.append(pages)
        allocator.check(owned)
    for pages in owned:
        allocator.free(pages)
    assert allocator.num_free == num_pages - 1

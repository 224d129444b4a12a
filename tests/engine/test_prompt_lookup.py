"""Drafts from a request's own tokens, against a plain search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax.engine.prompt_lookup import prompt_lookup


def searched(ids: list[int], most: int, longest: int, shortest: int) -> list[int]:
    """The definition, word by word."""
    for length in range(longest, shortest - 1, -1):
        places = [
            p for p in range(length, len(ids)) if ids[p - length : p] == ids[len(ids) - length :]
        ]
        if places and most > 0:
            full = [p for p in places if p + most <= len(ids)]
            start = full[-1] if full else places[0]
            return ids[start : start + most]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.integers(0, 6),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_it_is_what_followed_the_longest_match(ids, most, longest, shortest):
    shortest = min(longest, shortest)
    found = prompt_lookup(ids, most, longest=longest, shortest=shortest)
    assert found == searched(ids, most, longest, shortest)
    assert len(found) <= most and all(type(token) is int for token in found)


def test_examples():
    assert prompt_lookup([1, 2, 3, 4, 1, 2, 3], 2) == [4, 1]
    assert prompt_lookup([1, 2, 3, 4, 9, 2, 3], 2) == [4, 9]
    assert prompt_lookup([7, 8, 7, 8, 7, 8, 7, 8], 4) == [7, 8, 7, 8]
    assert prompt_lookup([5, 5], 3, shortest=1) == [5]
    assert prompt_lookup([1, 2, 3], 3) == prompt_lookup([], 3) == prompt_lookup([4], 3) == []
    assert prompt_lookup([1, 2, 9, 2], 3) == []

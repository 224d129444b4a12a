"""Drafts from a request's own tokens, against a plain search."""

from __future__ import annotations

import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax.engine.prompt_lookup import LONGEST, prompt_lookup

SIZE = 32


def searched(ids: list[int], most: int) -> list[int]:
    """The definition, word by word."""
    start = len(ids) - 1
    for length in range(LONGEST, 0, -1):
        places = [
            p for p in range(length, len(ids)) if ids[p - length : p] == ids[len(ids) - length :]
        ]
        if places:
            full = [p for p in places if p + most <= len(ids)]
            start = full[-1] if full else places[0]
            break
    repeated = ids[start:] * most
    return repeated[:most]


def found(texts: list[list[int]], most: int, lookup=prompt_lookup) -> list[list[int]]:
    """Of all texts at once, with anything behind them."""
    tokens = np.resize(np.arange(4, dtype=np.int32), (len(texts), SIZE))
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    drafts = lookup(tokens, np.array(list(map(len, texts)), np.int32), most)
    assert drafts.dtype == np.int32
    return drafts.tolist()


@functools.cache
def traced(most: int):
    return jax.jit(lambda tokens, counts: prompt_lookup(tokens, counts, most))


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=SIZE), min_size=4, max_size=4)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_it_is_what_followed_the_longest_match(texts, most):
    assert found(texts, most) == [searched(ids, most) for ids in texts]
    assert found(texts, most) == found(texts, most, lambda t, c, most: traced(most)(t, c))


def test_examples():
    assert found([[1, 2, 3, 4, 1, 2, 3]], 2) == [[4, 1]]
    assert found([[1, 2, 3, 4, 9, 2, 3]], 2) == [[4, 9]]
    assert found([[7, 8, 7, 8, 7, 8, 7, 8]], 4) == [[7, 8, 7, 8]]
    assert found([[5, 5]], 3) == [[5, 5, 5]]
    assert found([[1, 2, 9, 2]], 3) == [[9, 2, 9]]
    assert found([[1, 2, 3], [4]], 2) == [[3, 3], [4, 4]]  # nothing to go by

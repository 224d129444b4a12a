"""Options on the rows of a step, against numpy written out token by token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax.sampling.draw import NOT_FINITE, SamplingInputs, sample
from tbo_jax.sampling.logprobs import read_described
from tbo_jax.sampling.options import (
    ENDS,
    GENERATED,
    MAX_WORDS,
    PROMPTED,
    OptionInputs,
    RowOptions,
    RowTables,
    RowUpdate,
    change_logits,
    describe,
    update_rows,
)
from tbo_jax.sampling.params import SamplingParams
from tests.sampling.option_reference import agree, reference_logits, reference_logprobs

VOCABULARY, ROWS = 24, 3
jit_change = jax.jit(change_logits)
jit_update = jax.jit(update_rows)


def new_tables(vocabulary: int = VOCABULARY) -> RowTables:
    shapes = RowTables.shapes(ROWS, vocabulary)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def change(
    logits: np.ndarray, rows: list[RowOptions], tables: RowTables, before: tuple[int, ...] = (0,)
) -> tuple[np.ndarray, RowTables]:
    inputs = OptionInputs.unpack(jnp.asarray(OptionInputs.pack(dict(enumerate(rows)), len(logits))))
    found, marks = jit_change(logits, inputs, np.array(before, np.int32), tables.bias, tables.marks)
    return np.asarray(found), RowTables(tables.bias, marks)


def updated(tables: RowTables, **given: Any) -> RowTables:
    update = RowUpdate.empty(ROWS, 8)
    for name, value in given.items():
        array = getattr(update, name)
        if name == "cleared":
            array[:] = value
        else:
            array[: len(value)] = value
    return jit_update(tables, update)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


token = st.integers(0, VOCABULARY - 1)
tokens = st.lists(token, max_size=12)
penalty = st.sampled_from([1.0, 0.5, 1.3, 2.0])
addend = st.sampled_from([0.0, 0.4, -1.5, 2.0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(tokens, tokens, penalty, addend, addend), min_size=1, max_size=ROWS),
    st.integers(0, 2**32 - 1),
)
def test_penalties_equal_the_reference(
    requests: list[tuple[list[int], list[int], float, float, float]], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 4, (ROWS, VOCABULARY)).astype(np.float32)
    tables, rows = new_tables(), []
    for row, (prompt, generated, repetition, frequency, presence) in enumerate(requests):
        marks = [(row, t, PROMPTED) for t in set(prompt)] + [(row, t, GENERATED) for t in generated]
        for start in range(0, len(marks), 8):
            tables = updated(tables, marks=marks[start : start + 8])
        rows.append(RowOptions(row, repetition, presence, frequency))
    found, _ = change(logits, rows, tables)
    for row, (prompt, generated, repetition, frequency, presence) in enumerate(requests):
        params = SamplingParams(
            repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
        )
        assert agree(found[row], reference_logits(logits[row], params, prompt, generated))
    assert np.array_equal(found[len(requests) :], logits[len(requests) :])


def test_a_row_is_cleared_biased_and_marked() -> None:
    tables = updated(new_tables(), cleared=[2, 0, 1], bias=[(0, 3, bits(0)), (0, 5, bits(1.5))])
    tables = updated(tables, bias=[(2, 1, bits(-np.inf))], marks=[(2, 4, ENDS)])
    logits = np.ones((4, VOCABULARY), np.float32)
    rows = [RowOptions(0), RowOptions(2, may_not_end=True), RowOptions(2), RowOptions()]
    found, _ = change(logits, rows, tables)
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [3, 5]
    assert found[0, [3, 5]].tolist() == [1, 2.5]
    assert np.flatnonzero(np.isinf(found[1])).tolist() == [1, 4]
    assert np.flatnonzero(np.isinf(found[2])).tolist() == [1]
    assert np.array_equal(found[3], logits[3])
    tables = updated(tables, cleared=[1, 0, 0])  # the next request has it, and the other goes on
    found, _ = change(logits, rows, tables)
    assert np.array_equal(found[0], logits[0])
    assert np.flatnonzero(np.isinf(found[2])).tolist() == [1]


def test_a_token_of_the_step_before_counts() -> None:
    """Known, or still on the device; and only where it was not counted yet."""
    logits = np.zeros((3, VOCABULARY), np.float32)
    rows = [
        RowOptions(0, frequency_penalty=1.0, last=7, counts=True),
        RowOptions(1, frequency_penalty=1.0, last=-2, counts=True),
        RowOptions(2, frequency_penalty=1.0, last=9),
    ]
    found, tables = change(logits, rows, new_tables(), before=(5, 6))
    assert found[0, 7] == found[1, 6] == -1
    assert np.count_nonzero(found) == 2
    found, _ = change(logits, rows, tables, before=(5, 6))
    assert found[0, 7] == found[1, 6] == -2


def test_the_end_of_a_word_is_ruled_out_after_its_beginning() -> None:
    logits = np.zeros((3, VOCABULARY), np.float32)
    words = ((-1, 4), (6, 8), (5, 9))
    rows = [RowOptions(last=6, words=words), RowOptions(last=-2, words=words), RowOptions(last=6)]
    found, _ = change(logits, rows, new_tables(), before=(6, 5))
    assert [np.flatnonzero(np.isinf(row)).tolist() for row in found] == [[4, 8], [4, 9], []]


def test_as_many_words_as_there_is_room_for() -> None:
    words = tuple((-1, token) for token in range(2, 2 + MAX_WORDS))
    logits = np.zeros((1, MAX_WORDS + 10), np.float32)
    found, _ = change(logits, [RowOptions(words=words)], new_tables(MAX_WORDS + 10))
    assert np.flatnonzero(np.isinf(found[0])).tolist() == [token for _, token in words]


def test_what_is_not_finite_stays_so() -> None:
    """A token that is ruled out does not hide that the model is broken."""
    tables = updated(new_tables(), cleared=[2, 1, 0], bias=[(0, 3, bits(0))])
    logits = np.zeros((2, VOCABULARY), np.float32)
    logits[0, 8], logits[1, 2] = np.nan, np.inf
    rows = [RowOptions(0), RowOptions(1, words=((-1, 2),))]
    found, _ = change(logits, rows, tables)
    inputs = SamplingInputs.from_rows([], [], [], 2)
    assert np.asarray(sample(jnp.asarray(found), inputs)).tolist() == [NOT_FINITE] * 2


@pytest.mark.parametrize("most", [0, 1, 5, VOCABULARY])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_equal_log_softmax(most: int, dtype: str) -> None:
    rng = np.random.default_rng(most)
    logits = jnp.asarray(rng.normal(0, 5, (4, VOCABULARY)), dtype)
    logits = logits.at[3, 2].set(-np.inf)
    chosen = [3, int(jnp.argmax(logits[1])), 9, NOT_FINITE]
    found = np.asarray(jax.jit(describe, static_argnums=2)(logits, np.int32(chosen), most))
    for row, token_id in zip(range(3), chosen, strict=False):
        values = np.asarray(logits[row].astype(jnp.float32))
        expected = reference_logprobs(values)
        told = read_described(found[row], token_id, most)
        assert told.token_id == token_id
        assert abs(told.logprob - expected[token_id]) < 1e-4
        assert told.rank == (values >= values[token_id]).sum()
        best = np.argsort(-values, kind="stable")[:most]
        assert list(told.top) == best.tolist()
        assert np.allclose(list(told.top.values()), expected[best], atol=1e-4)
        assert (
            list(read_described(found[row], token_id, most // 2).top) == best[: most // 2].tolist()
        )

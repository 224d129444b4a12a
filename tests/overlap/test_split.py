"""The split against a reference in plain Python: lists and loops, no jax."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tbo_jax import ForwardBatch, gather_tokens, split_batch_decoder_layers

TOKENS, ROWS, PAGES = 23, 6, 3  # 23: no count of micro-batches divides it
IMAGE = 7  # token id of an image patch

by_count = {k: jax.jit(partial(split_batch_decoder_layers, num_micro_batches=k)) for k in (2, 3, 4)}
by_image = {
    k: jax.jit(partial(split_batch_decoder_layers, num_micro_batches=k, image_token_id=IMAGE))
    for k in (2, 3)
}
by_cut = jax.jit(lambda batch, cut: split_batch_decoder_layers(batch, cut=cut))
jit_gather = jax.jit(gather_tokens)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Token ids and context length of each sequence."""

    tokens: tuple[tuple[int, ...], ...]
    contexts: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


def ragged_of(lengths: Sequence[int], contexts: Sequence[int] | None = None) -> Ragged:
    """Sequences of these lengths; every token id occurs once and none is an image patch."""
    ids = itertools.count(100)
    contexts = range(0, 3 * len(lengths), 3) if contexts is None else contexts
    return Ragged(tuple(tuple(next(ids) for _ in range(n)) for n in lengths), tuple(contexts))


@st.composite
def ragged_batches(draw: st.DrawFn, token: st.SearchStrategy[int] | None = None) -> Ragged:
    """Mixes, decode rows only, one long prompt with short rows; with and without context."""
    lengths = draw(
        st.one_of(
            st.lists(st.integers(0, TOKENS), max_size=ROWS),
            st.lists(st.just(1), max_size=ROWS),
            st.tuples(st.integers(10, TOKENS), *[st.integers(0, 2)] * (ROWS - 1)).flatmap(
                st.permutations
            ),
        )
    )
    room, fitting = TOKENS, []
    for length in lengths:
        fitting.append(min(length, room))
        room -= fitting[-1]
    contexts = [draw(st.integers(0, 500)) for _ in fitting]
    if token is None:
        return ragged_of(fitting, contexts)
    return Ragged(
        tuple(tuple(draw(token) for _ in range(length)) for length in fitting), tuple(contexts)
    )


def batch_of(ragged: Ragged) -> ForwardBatch:
    """All optional fields, M-RoPE positions [3, T], a pair of mask offsets and 3 of D per token."""
    rng = np.random.default_rng(0)
    rows, count = len(ragged.tokens), ragged.count
    pages = rng.permutation(np.arange(1, 1 + ROWS * PAGES)).reshape(ROWS, PAGES)
    packed = ForwardBatch.pack(
        ragged.tokens,
        ragged.contexts,
        pages[:rows].tolist(),
        token_capacity=TOKENS,
        sequence_capacity=ROWS,
        pages_per_sequence=PAGES,
    )
    positions = rng.integers(1, 999, (3, TOKENS)).astype(np.int32)
    offsets = rng.integers(1, 999, 2 * TOKENS).astype(np.int32)
    rotary = rng.integers(1, 999, (ROWS, 2, 3, 2)).astype(np.float32)
    embeds = rng.integers(1, 999, (TOKENS, 3)).astype(np.float32)
    positions[:, count:], offsets[2 * count :], rotary[rows:], embeds[count:] = 0, 0, 0, 0
    return dataclasses.replace(
        packed,
        positions=positions,
        mask_offsets=offsets,
        rotary_tables=rotary,
        inputs_embeds=embeds,
    )


def with_garbage(batch: ForwardBatch, seed: int) -> ForwardBatch:
    """The same batch with arbitrary values wherever it is padding."""
    rng = np.random.default_rng(seed)
    count, rows = int(batch.num_tokens), int(batch.num_sequences)

    def garbage(value: Any, start: int, axis: int) -> np.ndarray:
        noise = rng.integers(-9999, 9999, value.shape).astype(value.dtype)
        live = np.arange(value.shape[axis]) < start
        return np.where(live if axis else live.reshape(-1, *[1] * (value.ndim - 1)), value, noise)

    return dataclasses.replace(
        batch,
        token_ids=np.where(np.arange(TOKENS) < count, batch.token_ids, IMAGE),
        positions=garbage(batch.positions, count, 1),
        sequence_ids=garbage(batch.sequence_ids, count, 0),
        mask_offsets=garbage(batch.mask_offsets, 2 * count, 0),
        inputs_embeds=garbage(batch.inputs_embeds, count, 0),
        query_lens=garbage(batch.query_lens, rows, 0),
        context_lens=garbage(batch.context_lens, rows, 0),
        cu_query_lens=garbage(batch.cu_query_lens, rows + 1, 0),
        page_table=garbage(batch.page_table, rows, 0),
        rotary_tables=garbage(batch.rotary_tables, rows, 0),
    )


def reference(ragged: Ragged, batch: ForwardBatch, start: int, stop: int) -> dict[str, Any]:
    """What the micro-batch of tokens [start, stop) must hold."""
    names = ("token_ids", "sequence_ids", "query_lens", "context_lens", "page_table")
    names += ("rotary_tables", "mask_offsets", "inputs_embeds")
    part: dict[str, Any] = {name: [] for name in names}
    part |= {"positions": [[], [], []], "cu_query_lens": [0]}
    token = 0
    for row, ids in enumerate(ragged.tokens):
        taken = 0
        for number, token_id in enumerate(ids):
            if start <= token < stop:
                if taken == 0:
                    part["context_lens"].append(ragged.contexts[row] + number)
                    part["page_table"].append(batch.page_table[row].tolist())
                    part["rotary_tables"].append(batch.rotary_tables[row].tolist())
                part["token_ids"].append(token_id)
                part["sequence_ids"].append(len(part["page_table"]) - 1)
                part["mask_offsets"] += batch.mask_offsets[2 * token : 2 * token + 2].tolist()
                part["inputs_embeds"].append(batch.inputs_embeds[token].tolist())
                for axis in range(3):
                    part["positions"][axis].append(int(batch.positions[axis, token]))
                taken += 1
            token += 1
        if taken:
            part["query_lens"].append(taken)
            part["cu_query_lens"].append(part["cu_query_lens"][-1] + taken)
    return part


def live(part: ForwardBatch) -> dict[str, Any]:
    """The part of a micro-batch that is not padding, as lists."""
    count, rows = int(part.num_tokens), int(part.num_sequences)
    ends = {"positions": count, "token_ids": count, "sequence_ids": count}
    ends |= {"mask_offsets": 2 * count, "cu_query_lens": rows + 1}
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return {
        name: np.asarray(value)[..., : ends[name]].tolist()
        if name in ends
        else np.asarray(value)[: count if name == "inputs_embeds" else rows].tolist()
        for name, value in fields.items()
        if np.ndim(value)
    }


def sizes_of(parts: Sequence[ForwardBatch]) -> list[int]:
    return [int(part.num_tokens) for part in parts]


def check(ragged: Ragged, batch: ForwardBatch, parts: Sequence[ForwardBatch]) -> None:
    """All tokens in order, and each micro-batch as the reference has it, for the sizes it has."""
    bounds = [0, *itertools.accumulate(sizes_of(parts))]
    assert bounds[-1] == ragged.count
    for part, start, stop in zip(parts, bounds, bounds[1:], strict=False):
        assert live(part) == reference(ragged, batch, start, stop)


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def compositions(total: int) -> list[tuple[int, ...]]:
    """All ways to make up `total` tokens of at most ROWS sequences with a token or more."""
    if total == 0:
        return [()]
    shorter = [
        (first, *rest) for first in range(1, total + 1) for rest in compositions(total - first)
    ]
    return [lengths for lengths in shorter if len(lengths) <= ROWS]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("tokens", range(9))
def test_every_small_batch(tokens: int, count: int) -> None:
    for lengths in compositions(tokens):
        ragged = ragged_of(lengths)
        batch = batch_of(ragged)
        parts = by_count[count](batch)
        check(ragged, batch, parts)
        sizes = sizes_of(parts)
        assert max(sizes) - min(sizes) <= 1
        if tokens < count:
            assert sizes == [0] * (count - tokens) + [1] * tokens


@settings(max_examples=60, deadline=None)
@given(ragged_batches(), st.sampled_from([2, 3, 4]), st.integers(0, 99))
@example(ragged_of([TOKENS]), 2, 0)
@example(ragged_of([18, 1, 1, 1, 1, 1]), 4, 1)
@example(ragged_of([0, 11, 0, 0, 12, 0]), 3, 2)
def test_ragged_batches(ragged: Ragged, count: int, seed: int) -> None:
    batch = batch_of(ragged)
    parts = by_count[count](batch)
    check(ragged, batch, parts)
    assert max(sizes_of(parts)) - min(sizes_of(parts)) <= 1
    assert {part.token_capacity for part in parts} == {-(-TOKENS // count)}
    assert_same(by_count[count](with_garbage(batch, seed)), parts)


@pytest.mark.parametrize("lengths", [(), (1,), (2,), (1, 1, 1), (5, 0, 9), (TOKENS,)])
def test_two_micro_batches_are_cut_at_the_middle(lengths: tuple[int, ...]) -> None:
    total = sum(lengths)
    expected = [-(-total // 2), total // 2] if total > 1 else [0, total]
    assert sizes_of(by_count[2](batch_of(ragged_of(lengths)))) == expected


def test_context_of_a_cut_sequence_grows() -> None:
    batch = batch_of(ragged_of([8], [24]))
    first, second = by_cut(batch, 4)
    assert (first.query_lens[0], first.context_lens[0]) == (4, 24)
    assert (second.query_lens[0], second.context_lens[0]) == (4, 28)


def test_three_micro_batches_of_one_sequence_grow_its_context_twice() -> None:
    parts = by_count[3](batch_of(ragged_of([9], [5])))
    assert [int(part.context_lens[0]) for part in parts] == [5, 8, 11]


@pytest.mark.parametrize("lengths", [(), (1,)])
def test_fewer_than_two_tokens_leave_the_first_empty(lengths: tuple[int, ...]) -> None:
    batch = batch_of(ragged_of(lengths, [40] * len(lengths)))
    for first, second in (by_count[2](batch), by_image[2](batch)):
        assert (first.num_tokens, first.num_sequences) == (0, 0)
        assert live(second) == live(batch)


def test_optional_and_one_dimensional_fields() -> None:
    batch = ForwardBatch.pack(
        [[1, 2, 3], [4, 5]], [0, 6], [[1], [2]],
        token_capacity=TOKENS, sequence_capacity=ROWS, pages_per_sequence=PAGES,
        mask_offsets=np.arange(10, 10 + TOKENS, dtype=np.int32),
    )  # fmt: skip
    first, second = by_count[2](batch)
    assert first.positions[:3].tolist() == [0, 1, 2]
    assert second.positions[:2].tolist() == [6, 7]
    assert first.mask_offsets[:3].tolist() == [10, 11, 12]
    assert second.mask_offsets[:2].tolist() == [13, 14]
    assert first.rotary_tables is second.rotary_tables is None


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(ragged_batches(st.sampled_from([IMAGE, 1])), st.integers(0, TOKENS))
def test_same_answer_outside_jit(ragged: Ragged, cut: int) -> None:
    batch = batch_of(ragged)
    cut = min(cut, ragged.count)
    assert_same(split_batch_decoder_layers(batch, 3), by_count[3](batch))
    assert_same(split_batch_decoder_layers(batch, image_token_id=IMAGE), by_image[2](batch))
    assert_same(split_batch_decoder_layers(batch, cut=cut), by_cut(batch, cut))


def test_other_values_compile_nothing(compilations: Callable[[], int]) -> None:
    by_count[3](batch_of(ragged_of([2, 2])))
    by_cut(batch_of(ragged_of([2, 2])), 3)
    before = compilations()
    for lengths in [(), (1,), (1, 1, 1, 1), (20, 1), (TOKENS,)]:
        by_count[3](batch_of(ragged_of(lengths)))
        for cut in {0, sum(lengths) // 3, sum(lengths)}:
            by_cut(batch_of(ragged_of(lengths)), cut)
    assert compilations() == before


# Image runs


def reference_image_cut(ragged: Ragged, ideal: int) -> int:
    """The admissible cut nearest `ideal`, the earlier of two; 0 if there is none."""
    ids = [(row, token) for row, tokens in enumerate(ragged.tokens) for token in tokens]
    admissible = [
        cut for cut in range(1, len(ids)) if not (ids[cut - 1] == ids[cut] and ids[cut][1] == IMAGE)
    ]
    return min(admissible, key=lambda cut: (abs(cut - ideal), cut), default=0)


@settings(max_examples=60, deadline=None)
@given(ragged_batches(st.sampled_from([IMAGE, IMAGE, IMAGE, 1])), st.integers(0, 99))
def test_image_runs_are_never_cut(ragged: Ragged, seed: int) -> None:
    batch = batch_of(ragged)
    total = ragged.count
    for count, split in by_image.items():
        parts = split(batch)
        check(ragged, batch, parts)
        ideal = [-(-k * total // count) if total >= count else 0 for k in range(1, count)]
        if total < count:
            ideal[-1] = total - 1 if total else 0  # the last ones get one token each
        cuts = [reference_image_cut(ragged, at) if at > 0 else 0 for at in ideal]
        assert [0, *itertools.accumulate(sizes_of(parts))][1:-1] == cuts
        assert_same(split(with_garbage(batch, seed)), parts)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        ([[1, 7, 7, 7, 7, 7, 1, 1]], [6, 2]),  # ideal 4: 6 is nearer than 1
        ([[1, 1, 7, 7, 7, 7, 7, 1]], [2, 6]),  # ideal 4: 2 is nearer than 7
        ([[1, 1, 7, 7, 7, 7, 1, 1]], [2, 6]),  # equal distance: the earlier
        ([[1, 1, 1, 7, 7, 7, 7, 7]], [3, 5]),
        ([[7, 7, 7, 7], [7, 7, 7, 7]], [4, 4]),  # between two sequences, between image tokens
        ([[7, 7, 7], [7, 7, 7, 7, 7]], [3, 5]),
        ([[7, 7, 7, 7, 7, 7, 7, 7]], [0, 8]),  # no admissible cut
        ([[7, 1]], [1, 1]),
        ([[7, 7]], [0, 2]),
    ],
)
def test_nearest_admissible_cut(tokens: list[list[int]], sizes: list[int]) -> None:
    ragged = Ragged(tuple(map(tuple, tokens)), (0,) * len(tokens))
    batch = batch_of(ragged)
    parts = by_image[2](batch)
    assert sizes_of(parts) == sizes
    check(ragged, batch, parts)


# Spans of `mask_offsets`


def reference_span_cut(ragged: Ragged, spans: np.ndarray, ideal: int) -> int:
    """The nearest cut with no token before it that may see one of its sequence behind it."""
    places = [
        (row, context + number)
        for row, (ids, context) in enumerate(zip(ragged.tokens, ragged.contexts, strict=True))
        for number in range(len(ids))
    ]
    admissible = [
        cut
        for cut in range(1, len(places))
        if not any(
            places[before][0] == places[behind][0] and places[behind][1] <= spans[before, 1]
            for before in range(cut)
            for behind in range(cut, len(places))
        )
    ]
    return min(admissible, key=lambda cut: (abs(cut - ideal), cut), default=0)


by_spans = jax.jit(partial(split_batch_decoder_layers, keep_spans=True))
by_spans_and_image = jax.jit(
    partial(split_batch_decoder_layers, keep_spans=True, image_token_id=IMAGE)
)


@settings(max_examples=50, deadline=None)
@given(ragged_batches(), st.integers(0, 99))
@example(ragged_of([TOKENS]), 0)
@example(ragged_of([9, 9]), 1)
def test_spans_are_never_cut(ragged: Ragged, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans = rng.integers(-5, 999, (TOKENS, 2)).astype(np.int32)
    token = 0
    for ids, context in zip(ragged.tokens, ragged.contexts, strict=True):
        for place in range(context, context + len(ids)):
            reach = rng.choice([-3, 0, 0, 0, 1, 2, 6, 500], p=[0.1, *[0.25] * 3, *[0.0375] * 4])
            spans[token, 1] = place + reach
            token += 1
    batch = dataclasses.replace(batch_of(ragged), mask_offsets=spans.reshape(-1))
    total = ragged.count
    parts = by_spans(batch)
    check(ragged, batch, parts)
    ideal = -(-total // 2) if total > 1 else 0
    cut = reference_span_cut(ragged, spans, ideal) if ideal else 0
    assert sizes_of(parts) == [cut, total - cut]
    assert_same(by_spans(with_garbage(batch, seed)), parts)


def test_images_and_spans_both_stay_whole() -> None:
    ragged = Ragged(((1, IMAGE, IMAGE, 1, 1, 1, 1, 1),), (0,))
    last = np.arange(TOKENS)
    last[3:6] = 5  # with the image before it no cut from 2 to 5 but 3
    spans = np.stack([0 * last, last], 1).astype(np.int32)
    batch = dataclasses.replace(batch_of(ragged), mask_offsets=spans.reshape(-1))
    assert sizes_of(by_spans_and_image(batch)) == [3, 5]
    last[1:6] = 5
    spans[:, 1] = last
    batch = dataclasses.replace(batch, mask_offsets=spans.reshape(-1))
    assert sizes_of(by_spans_and_image(batch)) == [6, 2]


@pytest.mark.parametrize(
    ("last", "context", "sizes"), [(2**31 - 1, 0, [5, 9]), (-(2**31), 9, [7, 7])]
)
def test_the_last_key_may_be_any_int32(last: int, context: int, sizes: list[int]) -> None:
    ragged = Ragged((tuple(range(4)), tuple(range(10))), (0, context))
    spans = np.zeros((TOKENS, 2), np.int32)
    spans[5, 1] = last  # the row's second token: it sees all keys, or none
    batch = dataclasses.replace(batch_of(ragged), mask_offsets=spans.reshape(-1))
    assert sizes_of(by_spans(batch)) == sizes


def test_spans_are_needed_to_keep_them() -> None:
    for offsets, shape in ((None, "None"), (np.zeros(TOKENS, np.int32), r"\(23,\)")):
        batch = dataclasses.replace(SMALL, mask_offsets=offsets)
        with pytest.raises(
            ValueError, match=rf"needs mask_offsets \[2T\] for T = 23, got shape {shape}"
        ):
            split_batch_decoder_layers(batch, keep_spans=True)
    with pytest.raises(ValueError, match="keep_spans must be True or False, got 1"):
        split_batch_decoder_layers(SMALL, keep_spans=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give cut or keep_spans, not both"):
        split_batch_decoder_layers(SMALL, keep_spans=True, cut=3)


# Given cuts


@settings(max_examples=30, deadline=None)
@given(ragged_batches(), st.integers(0, TOKENS))
def test_given_cut_is_taken_as_it_is(ragged: Ragged, cut: int) -> None:
    cut = min(cut, ragged.count)
    batch = batch_of(ragged)
    parts = by_cut(batch, cut)  # a traced scalar
    check(ragged, batch, parts)
    assert sizes_of(parts) == [cut, ragged.count - cut]


@pytest.mark.parametrize("cuts", [(0, 0, 0), (1, 1, 6), (2, 3, 7), (7, 7, 7)])
def test_several_given_cuts(cuts: tuple[int, ...]) -> None:
    ragged = ragged_of([3, 4])
    batch = batch_of(ragged)
    parts = split_batch_decoder_layers(batch, 4, cut=cuts)
    check(ragged, batch, parts)
    assert list(itertools.accumulate(sizes_of(parts)))[:-1] == list(cuts)


def test_one_micro_batch_is_the_whole() -> None:
    ragged = ragged_of([3, 4])
    batch = batch_of(ragged)
    (whole,) = split_batch_decoder_layers(batch, 1)
    check(ragged, batch, [whole])


def test_capacity_bounds_the_slots_and_the_rows() -> None:
    ragged = ragged_of([1, 3, 1, 1])
    batch = batch_of(ragged)
    parts = split_batch_decoder_layers(batch, cut=2, capacity=4)
    check(ragged, batch, parts)
    assert {(part.token_capacity, part.sequence_capacity) for part in parts} == {(4, 4)}


# Gather


@settings(max_examples=30, deadline=None)
@given(ragged_batches(), st.sampled_from([2, 3, 4]), st.randoms(use_true_random=False))
def test_gather_restores_the_order(ragged: Ragged, count: int, random: Any) -> None:
    parts = by_count[count](batch_of(ragged))
    values = [np.stack([part.token_ids, -part.token_ids], axis=-1) for part in parts]
    order = list(range(ragged.count))
    random.shuffle(order)
    asked = np.array(order + [0] * (TOKENS - len(order)), np.int32)
    found = jit_gather(values, parts, asked)[: ragged.count]
    flat = [token for tokens in ragged.tokens for token in tokens]
    assert found[:, 0].tolist() == [flat[token] for token in order]
    assert found[:, 1].tolist() == [-flat[token] for token in order]


def test_gather_refuses_what_does_not_agree() -> None:
    parts = by_count[2](batch_of(ragged_of([3, 4])))
    slots = parts[0].token_capacity
    values = [np.zeros((slots, 2), np.float32)] * 2
    at = np.arange(7, dtype=np.int32)
    gather_tokens(values, parts, at)

    def refused(message: str, values: Any = values, parts: Any = parts, at: Any = at) -> None:
        for gather in (gather_tokens, lambda *given: jax.eval_shape(gather_tokens, *given)):
            with pytest.raises(ValueError, match=message):
                gather(values, parts, at)

    refused("got 1 arrays and 2 micro-batches", values[:1])
    refused("got 0 arrays and 0 micro-batches", [], [])
    refused(r"micro-batch 0 has shape \(11, 2\) for 12 token slots", [v[:-1] for v in values])
    refused(r"micro-batch 1 has shape \(12, 3\)", [values[0], np.zeros((slots, 3), np.float32)])
    refused("micro-batch 1 has dtype int32", [values[0], np.zeros((slots, 2), np.int32)])
    refused(r"tokens must be integers \[N\], got shape \(1, 7\)", at=at[None])
    refused(r"tokens must be integers \[N\], got shape \(7,\) of float32", at=at.astype(np.float32))
    for outside in (-1, 7):
        with pytest.raises(ValueError, match=rf"7 live tokens, got {min(outside, 0)} to"):
            gather_tokens(values, parts, np.array([0, outside], np.int32))


# Errors

SMALL = batch_of(ragged_of([3, 4]))


@pytest.mark.parametrize("name", ["num_micro_batches", "capacity", "image_token_id"])
@pytest.mark.parametrize("value", [-1, True, 2.0, "2", [2]])
def test_arguments_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* got {re.escape(repr(value))}"):
        split_batch_decoder_layers(SMALL, **{name: value})


def test_no_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1, got 0"):
        split_batch_decoder_layers(SMALL, 0)
    with pytest.raises(ValueError, match="image_token_id must be an int32, got 2147483648"):
        split_batch_decoder_layers(SMALL, image_token_id=2**31)
    with pytest.raises(ValueError, match="a split needs a ForwardBatch, got dict"):
        split_batch_decoder_layers({})  # type: ignore[type-var]


def test_arguments_may_be_integers_of_numpy() -> None:
    found = split_batch_decoder_layers(SMALL, np.int64(2), None, np.int32(3), capacity=np.int8(9))
    assert_same(found, split_batch_decoder_layers(SMALL, 2, cut=3, capacity=9))


@pytest.mark.parametrize("cut", [True, 2.0, "2", [2.0], [None], 2**40, {}])
def test_a_cut_that_is_no_number_of_tokens_is_refused(cut: Any) -> None:
    with pytest.raises(ValueError, match=rf"number of tokens.* got {re.escape(repr(cut))}"):
        split_batch_decoder_layers(SMALL, cut=cut)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_tokens=24), "num_tokens must be from 0 to 23, got 24"),
        (dict(num_tokens=-1), "num_tokens must be from 0 to 23, got -1"),
        (dict(num_tokens=6), r"query_lens must add up to num_tokens = 6, got \[3, 4\]"),
        (dict(num_sequences=7), "num_sequences must be from 0 to 6, got 7"),
        (dict(query_lens=(8, -1)), "query_lens must not be negative, got -1"),
        (dict(context_lens=(0, -2)), "context_lens must not be negative, got -2"),
        (dict(cu_query_lens=(0, 4, 7)), r"cu_query_lens .* got \[0, 4, 7\]"),
        (dict(sequence_ids=(0, 0, 1, 1, 1, 1, 1)), r"sequence_ids must be the row of each token"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    """Where they are known: inside jit nobody knows them."""
    (name,) = changes
    array = np.array(getattr(SMALL, name))
    array[... if array.ndim == 0 else slice(0, len(changes[name]))] = changes[name]
    batch = dataclasses.replace(SMALL, **{name: array})
    with pytest.raises(ValueError, match=rf"ForwardBatch\.{message}"):
        split_batch_decoder_layers(batch)
    by_count[2](batch)


def test_cut_and_image_id_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cut or image_token_id, not both"):
        split_batch_decoder_layers(SMALL, image_token_id=IMAGE, cut=3)


@pytest.mark.parametrize(
    ("count", "cut"), [(2, 8), (2, -1), (3, (5, 4)), (3, (-1, 4)), (3, (2, 8))]
)
def test_cut_outside_the_tokens_is_refused(count: int, cut: Any) -> None:
    with pytest.raises(ValueError, match=r"must not decrease and lie in \[0, 7\]"):
        split_batch_decoder_layers(SMALL, count, cut=cut)


@pytest.mark.parametrize(("count", "cut"), [(3, 4), (2, (3, 4)), (1, 0)])
def test_wrong_number_of_cuts_is_refused(count: int, cut: Any) -> None:
    with pytest.raises(ValueError, match=rf"{count} micro-batches need {count - 1} cut\(s\)"):
        split_batch_decoder_layers(SMALL, count, cut=cut)


def test_capacity_below_a_balanced_share_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity 11 is too small: 23 tokens in 2 micro-batches"):
        split_batch_decoder_layers(SMALL, capacity=11)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        split_batch_decoder_layers(SMALL, cut=3, capacity=0)


def test_micro_batch_larger_than_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="micro-batch of 5 tokens exceeds the capacity 4"):
        split_batch_decoder_layers(SMALL, cut=2, capacity=4)


def test_split_has_one_meaning_for_numpy_and_jax_arrays() -> None:
    assert_same(by_count[2](jax.tree.map(jnp.asarray, SMALL)), by_count[2](SMALL))

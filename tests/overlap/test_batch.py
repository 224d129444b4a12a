from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tbo_jax import (
    ForwardBatch,
    SplitRule,
    batch_dataclass,
    batch_field,
    split_batch_decoder_layers,
)
from tbo_jax.overlap.batch import stack_batches

BUCKET = {"token_capacity": 8, "sequence_capacity": 3, "pages_per_sequence": 2}


@batch_dataclass
class AdapterBatch(ForwardBatch):
    """A batch of somebody who adds a field of each kind."""

    draft_scores: Any = batch_field(SplitRule.TOKEN)  # [T]
    adapter_ids: Any = batch_field(SplitRule.SEQUENCE)  # [B]
    temperature: Any = batch_field(SplitRule.SHARED)  # []
    absent: Any = batch_field(SplitRule.TOKEN, default=None)


def test_field_without_a_rule_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"Careless\.lora_ids does not say how it is split"):

        @batch_dataclass
        class Careless(ForwardBatch):
            lora_ids: Any = None


def test_derived_field_of_a_subclass_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"Hopeful\.total: no code derives"):

        @batch_dataclass
        class Hopeful(ForwardBatch):
            total: Any = batch_field(SplitRule.DERIVED)


def test_a_rule_must_be_a_split_rule() -> None:
    with pytest.raises(TypeError, match="'token'"):
        batch_field("token")


def test_fields_of_a_subclass_survive_the_split() -> None:
    batch = AdapterBatch.pack(
        [[1, 2], [3, 4, 5], [6]],
        [0, 7, 9],
        [[1], [2], [3]],
        draft_scores=np.array([10, 11, 12, 13, 14, 15, -1, -1], np.int32),
        adapter_ids=np.array([70, 80, 90], np.int32),
        temperature=np.float32(0.5),
        **BUCKET,
    )
    first, second = split_batch_decoder_layers(batch)
    assert type(first) is type(second) is AdapterBatch
    assert first.draft_scores[:3].tolist() == [10, 11, 12]
    assert second.draft_scores[:3].tolist() == [13, 14, 15]
    assert first.adapter_ids[:2].tolist() == [70, 80]
    assert second.adapter_ids[:2].tolist() == [80, 90]
    assert first.temperature == second.temperature == 0.5
    assert first.absent is second.absent is None


@batch_dataclass
class WideBatch(ForwardBatch):
    """A batch with a field of each rule, of any size that the rule allows."""

    per_token: Any = batch_field(SplitRule.TOKEN, default=None)
    per_row: Any = batch_field(SplitRule.TOKEN_ROW, default=None)
    per_sequence: Any = batch_field(SplitRule.SEQUENCE, default=None)


T, B = BUCKET["token_capacity"], BUCKET["sequence_capacity"]


def right_shape(name: str, shape: tuple[int, ...]) -> bool:
    """What the rules ask for, in words of its own."""
    if name == "per_token":
        return bool(shape) and shape[-1] in range(T, 99, T)
    return bool(shape) and shape[0] == {"per_row": T, "per_sequence": B}[name]


def wide(**fields: Any) -> WideBatch:
    return WideBatch.pack([[1, 2, 3], [4, 5]], [0, 3], [[1], [2]], **BUCKET, **fields)


axis = st.sampled_from([0, 1, 2, B, T - 1, T, T + 1, 2 * T, 3 * T])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["per_token", "per_row", "per_sequence"]),
    st.lists(axis, max_size=3).map(tuple),
)
@example("per_token", (0,))
@example("per_token", (3, 2 * T))
@example("per_row", (2 * T,))
@example("per_sequence", ())
def test_a_field_has_the_size_that_its_rule_asks_for(name: str, shape: tuple[int, ...]) -> None:
    """`pack`, the split outside jit and the split inside it are of one opinion."""
    field = np.zeros(shape, np.float32)
    # Not through pack.
    batch = dataclasses.replace(wide(), **{name: field})
    traced = jax.ShapeDtypeStruct(shape, np.float32)
    attempts = [
        lambda: wide(**{name: field}),
        batch.check_shapes,
        lambda: jax.eval_shape(
            split_batch_decoder_layers, dataclasses.replace(batch, **{name: traced})
        ),
    ]
    for attempt in attempts:
        if right_shape(name, shape):
            attempt()
        else:
            expected = rf"WideBatch\.{name} \([A-Z_]+\) has shape {re.escape(str(shape))}: expected"
            with pytest.raises(ValueError, match=expected):
                attempt()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("token_ids", (2, T), r"\[T\] .*; a batch of several ranks is split rank by rank"),
        ("positions", (T + 1,), r"\[T\] or \[3, T\] with T = 8 token slots and B = 3"),
        ("positions", (2, T), r"\[T\] or \[3, T\]"),
        ("sequence_ids", (B,), r"\[T\]"),
        ("query_lens", (1, B), r"\[B\]"),
        ("context_lens", (B + 1,), r"\[B\]"),
        ("cu_query_lens", (B,), r"\[B\+1\]"),
        ("page_table", (B - 1, 2), r"\[B, P\]"),
        ("page_table", (B,), r"\[B, P\]"),
        ("num_tokens", (1,), r"\[\]"),
        ("inputs_embeds", (T,), r"\[T, D\]"),
        ("mask_offsets", (3 * T,), r"\[T\] or \[2T\]"),
        ("mask_offsets", (T - 1,), r"\[T\] or \[2T\]"),
    ],
)
def test_own_fields_have_their_size(name: str, shape: tuple[int, ...], expected: str) -> None:
    batch = dataclasses.replace(wide(), **{name: np.zeros(shape, np.int32)})
    message = (
        rf"WideBatch\.{name} \([A-Z_]+\) has shape {re.escape(str(shape))}: expected {expected}"
    )
    for split in (split_batch_decoder_layers, jax.jit(split_batch_decoder_layers)):
        with pytest.raises(ValueError, match=message):
            split(batch)


def test_a_batch_of_several_ranks_is_not_split() -> None:
    batch = stack_batches([wide(), wide()])
    with pytest.raises(ValueError, match="split rank by rank"):
        split_batch_decoder_layers(batch)
    parts = jax.eval_shape(jax.vmap(split_batch_decoder_layers), batch)
    assert [part.token_ids.shape for part in parts] == [(2, T // 2)] * 2


def test_values_of_fields_are_arrays_of_integers() -> None:
    with pytest.raises(
        ValueError, match=r"positions \(TOKEN\) has dtype float32: expected integers"
    ):
        wide(positions=np.zeros(T, np.float32))
    with pytest.raises(ValueError, match=r"per_sequence .* is of type list: expected an array"):
        wide(per_sequence=[1, 2, 3])
    with pytest.raises(ValueError, match=r"page_table .* is of type NoneType: expected an array"):
        split_batch_decoder_layers(dataclasses.replace(wide(), page_table=None))


def test_pack_lays_sequences_out_one_after_another() -> None:
    batch = ForwardBatch.pack([[5, 6, 7], [8]], [4, 0], [[2, 3], [1]], **BUCKET)
    expected = {
        "token_ids": [5, 6, 7, 8, 0, 0, 0, 0],
        "positions": [4, 5, 6, 0, 0, 0, 0, 0],
        "sequence_ids": [0, 0, 0, 1, 0, 0, 0, 0],
        "query_lens": [3, 1, 0],
        "context_lens": [4, 0, 0],
        "cu_query_lens": [0, 3, 4, 4],
        "page_table": [[2, 3], [1, 0], [0, 0]],
        "num_tokens": 4,
        "num_sequences": 2,
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(batch))
    assert (batch.token_capacity, batch.sequence_capacity) == (8, 3)


def test_pack_of_nothing_is_all_padding() -> None:
    batch = ForwardBatch.pack([], [], [], **BUCKET)
    assert all(not leaf.any() for leaf in jax.tree.leaves(batch))


@pytest.mark.parametrize(
    ("tokens", "pages", "what"),
    [
        ([[1] * 5, [1] * 4], [[1], [2]], "9 tokens, 2 sequences and up to 1 pages"),
        ([[1]] * 4, [[1]] * 4, "4 tokens, 4 sequences and up to 1 pages"),
        ([[1]], [[1, 2, 3]], "1 tokens, 1 sequences and up to 3 pages"),
    ],
)
def test_pack_refuses_what_does_not_fit(
    tokens: list[list[int]], pages: list[list[int]], what: str
) -> None:
    with pytest.raises(ValueError, match=f"{what} a sequence does not fit .* 8 tokens, 3 seq"):
        ForwardBatch.pack(tokens, [0] * len(tokens), pages, **BUCKET)


@pytest.mark.parametrize(("contexts", "pages"), [([0], [[1], [2]]), ([0, 0], [[1]])])
def test_pack_refuses_lists_of_different_length(
    contexts: list[int], pages: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="one entry per sequence in each list, got 2 token lists"):
        ForwardBatch.pack([[1], [2]], contexts, pages, **BUCKET)


def pack_one(
    tokens: Any = (1, 2), context: Any = 0, pages: Any = (1,), **options: Any
) -> ForwardBatch:
    return ForwardBatch.pack([tokens], [context], [pages], **BUCKET | options)


@pytest.mark.parametrize("name", BUCKET)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_pack_refuses_a_bad_capacity(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* got {re.escape(repr(value))}"):
        pack_one(**{name: value})


def test_pack_takes_integers_of_numpy() -> None:
    sizes = {name: np.int64(size) for name, size in BUCKET.items()}
    made = pack_one(np.array([1, 2]), np.int32(1), np.array([1], np.uint8), **sizes)
    plain = pack_one([1, 2], 1, [1])
    assert jax.tree.all(jax.tree.map(np.array_equal, made, plain))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tokens=[1, 2.5]), r"token ids must be integers, got 2\.5"),
        (dict(tokens=["a"]), "token ids must be integers, got 'a'"),
        (dict(tokens=[[1], [2]]), "token ids must be integers"),
        (dict(tokens=[1, None]), "token ids must be integers, got None"),
        (dict(tokens=[True]), "token ids must be integers, got True"),
        (dict(tokens=[2**31]), "token ids must be from -2147483648 to 2147483647, got 2147483648"),
        (dict(tokens=[2**70]), "token ids must be"),
        (dict(context=-1), "context lengths must be from 0 to 2147483647, got -1"),
        (dict(context=1.0), r"context lengths must be integers, got 1\.0"),
        (dict(context=True), "context lengths must be integers, got True"),
        (dict(pages=[0]), r"page ids \(page 0 is for padding\) must be from 1 .* got 0"),
        (dict(pages=[1, -1]), r"page ids .* must be from 1 to 2147483647, got -1"),
        (dict(pages=[1.0]), r"page ids .* must be integers, got 1\.0"),
        (dict(pages=[]), r"sequence 0 has 0 tokens in the cache and 2 new .* do not hold any"),
        (
            dict(context=7, page_size=4, pages=[1, 2]),
            r"sequence 0 has 7 .* and 2 new ones: its 2 page\(s\) do not hold more than 4 tokens a page",
        ),
        (dict(page_size=0), "page_size must be at least 1, got 0"),
    ],
)
def test_pack_refuses_what_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_one(**arguments)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 9), st.integers(0, 2)), max_size=3),
    st.integers(1, 5),
)
def test_pack_takes_what_the_pages_hold(rows: list[tuple[int, int, int]], page_size: int) -> None:
    """Each row: tokens, context, pages."""
    tokens = [[7] * count for count, _, _ in rows]
    held = all(
        context >= 0 and count + context <= pages * page_size for count, context, pages in rows
    )
    fits = sum(map(len, tokens)) <= T
    arguments = (
        tokens, [context for _, context, _ in rows], [[1, 2][:pages] for _, _, pages in rows]
    )  # fmt: skip
    if held and fits:
        ForwardBatch.pack(*arguments, **BUCKET, page_size=page_size)
    else:
        with pytest.raises(ValueError):
            ForwardBatch.pack(*arguments, **BUCKET, page_size=page_size)


def test_batch_is_a_frozen_pytree() -> None:
    batch = ForwardBatch.pack([[1, 2]], [0], [[1]], **BUCKET)
    leaves, structure = jax.tree.flatten(batch)
    assert len(leaves) == 9  # the two optional fields are absent
    assert isinstance(jax.tree.unflatten(structure, leaves), ForwardBatch)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.num_tokens = 3  # type: ignore[misc]


def test_stacked_batches_have_an_axis_of_ranks() -> None:
    one = ForwardBatch.pack([[1, 2]], [0], [[1]], **BUCKET)
    two = ForwardBatch.pack([], [], [], **BUCKET)
    both = stack_batches([one, two])
    assert both.page_table.shape == (2, 3, 2)
    assert both.num_tokens.tolist() == [2, 0]
    assert (both.token_capacity, both.sequence_capacity) == (8, 3)


def test_batches_of_all_ranks_are_alike() -> None:
    one = wide(per_sequence=np.zeros((B, 2)))
    with pytest.raises(ValueError, match="a batch for each rank, got none"):
        stack_batches([])
    with pytest.raises(ValueError, match=r"per_sequence must have one shape .* rank 1 \(3, 4\)"):
        stack_batches([one, wide(per_sequence=np.zeros((B, 4)))])
    with pytest.raises(ValueError, match=r"per_sequence must have one shape .* rank 1 None"):
        stack_batches([one, wide()])
    with pytest.raises(ValueError, match="rank 0 has WideBatch, rank 1 ForwardBatch"):
        stack_batches([one, ForwardBatch.pack([], [], [], **BUCKET)])

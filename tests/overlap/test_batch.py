from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

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


def test_token_field_of_another_length_is_refused() -> None:
    batch = AdapterBatch.pack(
        [[1]], [0], [[1]],
        draft_scores=np.zeros(9, np.int32),
        adapter_ids=np.zeros(3, np.int32),
        temperature=np.float32(1),
        **BUCKET,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"\(9,\) does not divide into 8 tokens"):
        split_batch_decoder_layers(batch)


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

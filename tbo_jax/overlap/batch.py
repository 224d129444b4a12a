"""The ragged batch of one step, and how each of its fields is cut into micro-batches.

Every field of a batch declares its rule where it is defined, so that a field cannot be lost in a
hand-copied half: a field without a rule is an error when the class is made, not a wrong answer.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import numpy as np

Array = Any  # jax.Array, or numpy.ndarray on the host


class SplitRule(enum.Enum):
    """How a field of a batch is cut into micro-batches."""

    TOKEN = "token"  # one entry (or a fixed number of entries) per token, along the last axis
    TOKEN_ROW = "token_row"  # one row per token, along the first axis
    SEQUENCE = "sequence"  # one entry per sequence, along the first axis
    SHARED = "shared"  # every micro-batch gets the whole
    DERIVED = "derived"  # computed again from the cut by `split_batch_decoder_layers`


def batch_field(rule: SplitRule, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that declares how it is split.

    Args:
        rule: TOKEN, TOKEN_ROW, SEQUENCE or SHARED; DERIVED is for `ForwardBatch`'s own fields.
        default: default value, `None` for an optional field.
    """
    if not isinstance(rule, SplitRule):
        raise TypeError(f"batch_field needs a SplitRule, got {rule!r}")
    return dataclasses.field(default=default, metadata={"split": rule})


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(batch_field,))
def batch_dataclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree whose fields all say how they are split.

    Raises:
        TypeError: a field has no `SplitRule`, or a subclass adds a field with rule DERIVED, which
            nothing would derive.
    """
    inherited = {f.name for base in cls.__mro__[1:] for f in _fields_of(base)}
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        rule = field.metadata.get("split")
        if rule is None:
            raise TypeError(
                f"{cls.__name__}.{field.name} does not say how it is split: declare it with "
                f"batch_field(SplitRule.TOKEN | TOKEN_ROW | SEQUENCE | SHARED)"
            )
        if rule is SplitRule.DERIVED and inherited and field.name not in inherited:
            raise TypeError(f"{cls.__name__}.{field.name}: no code derives a field of a subclass")
    names = [f.name for f in dataclasses.fields(made)]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(made, data_fields=names, meta_fields=[])


def _fields_of(cls: type) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


@batch_dataclass
class ForwardBatch:
    """A ragged batch, padded to a static bucket of T tokens and B sequences.

    Tokens of one sequence are contiguous and sequences stand in the order of their rows. Entries
    past `num_tokens` and `num_sequences` are padding: their content is never read. For several
    ranks the leaves carry one more leading axis [R, ...], one batch a rank (`stack_batches`).
    """

    token_ids: Array = batch_field(SplitRule.TOKEN)  # [T] int32
    positions: Array = batch_field(SplitRule.TOKEN)  # [T], or [3, T] for M-RoPE, int32
    sequence_ids: Array = batch_field(SplitRule.DERIVED)  # [T] int32, the row of each token
    query_lens: Array = batch_field(SplitRule.DERIVED)  # [B] int32, tokens of this step
    context_lens: Array = batch_field(SplitRule.DERIVED)  # [B] int32, tokens cached before it
    cu_query_lens: Array = batch_field(SplitRule.DERIVED)  # [B + 1] int32, cumulative query_lens
    page_table: Array = batch_field(SplitRule.SEQUENCE)  # [B, P] int32, pages of each sequence
    num_tokens: Array = batch_field(SplitRule.DERIVED)  # [] int32, live tokens
    num_sequences: Array = batch_field(SplitRule.DERIVED)  # [] int32, live sequences
    # [T, D] of the model's dtype: taken for tokens with the model's image_token_id in place of
    # their entry in the embedding table
    inputs_embeds: Array | None = batch_field(SplitRule.TOKEN_ROW, default=None)
    # [T], or [2T] (a pair per token), int32: first (and last) key that a token may see
    mask_offsets: Array | None = batch_field(SplitRule.TOKEN, default=None)
    # [B, ...]: a rotary table of its own for each sequence
    rotary_tables: Array | None = batch_field(SplitRule.SEQUENCE, default=None)

    @property
    def token_capacity(self) -> int:
        """T, the static number of token slots."""
        return self.token_ids.shape[-1]

    @property
    def sequence_capacity(self) -> int:
        """B, the static number of sequence rows."""
        return self.query_lens.shape[-1]

    @classmethod
    def pack(
        cls,
        tokens: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        token_capacity: int,
        sequence_capacity: int,
        pages_per_sequence: int,
        **extra: Any,
    ) -> Self:
        """Lay sequences out one after another in host memory (numpy), padded to a bucket.

        Args:
            tokens: the tokens of this step, for each sequence.
            context_lens: tokens of each sequence that are in the cache already.
            pages: the pages of each sequence, in order.
            token_capacity, sequence_capacity, pages_per_sequence: T, B and P of the bucket.
            extra: further fields, already padded; or `positions`, in place of the ones that follow
                from the context lengths.

        Raises:
            ValueError: the sequences do not fit the bucket, or the lists differ in length.
        """
        if not len(tokens) == len(context_lens) == len(pages):
            raise ValueError(
                f"pack needs one entry per sequence in each list, got {len(tokens)} token lists, "
                f"{len(context_lens)} context lengths, {len(pages)} page lists"
            )
        lengths = np.array([len(t) for t in tokens], np.int32)
        total, rows = int(lengths.sum()), len(tokens)
        widest = max((len(p) for p in pages), default=0)
        if total > token_capacity or rows > sequence_capacity or widest > pages_per_sequence:
            raise ValueError(
                f"batch of {total} tokens, {rows} sequences and up to {widest} pages a sequence "
                f"does not fit the bucket of {token_capacity} tokens, {sequence_capacity} "
                f"sequences and {pages_per_sequence} pages"
            )
        token_ids = np.zeros(token_capacity, np.int32)
        positions = np.zeros(token_capacity, np.int32)
        sequence_ids = np.zeros(token_capacity, np.int32)
        query_lens = np.zeros(sequence_capacity, np.int32)
        contexts = np.zeros(sequence_capacity, np.int32)
        page_table = np.zeros((sequence_capacity, pages_per_sequence), np.int32)
        query_lens[:rows] = lengths
        contexts[:rows] = context_lens
        start = 0
        for row, (ids, context, owned) in enumerate(zip(tokens, context_lens, pages, strict=True)):
            stop = start + len(ids)
            token_ids[start:stop] = ids
            positions[start:stop] = np.arange(context, context + len(ids))
            sequence_ids[start:stop] = row
            page_table[row, : len(owned)] = owned
            start = stop
        return cls(
            token_ids=token_ids,
            positions=extra.pop("positions", positions),
            sequence_ids=sequence_ids,
            query_lens=query_lens,
            context_lens=contexts,
            cu_query_lens=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            page_table=page_table,
            num_tokens=np.int32(total),
            num_sequences=np.int32(rows),
            **extra,
        )


def stack_batches(batches: Sequence[ForwardBatch]) -> ForwardBatch:
    """Join the batches of R ranks: every leaf gets a leading axis [R, ...] (numpy)."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

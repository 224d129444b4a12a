"""The ragged batch of one step, and how each of its fields is cut into micro-batches.

Every field of a batch declares its rule where it is defined, so that a field cannot be lost in a
hand-copied half: a field without a rule is an error when the class is made, not a wrong answer.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import numpy as np

from tbo_jax.overlap.checks import whole_number

Array = Any  # jax.Array, or numpy.ndarray on the host

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1  # of int32


class SplitRule(enum.Enum):
    """How a field of a batch is cut into micro-batches."""

    TOKEN = "token"  # one entry (or a fixed number of entries) per token, along the last axis
    TOKEN_ROW = "token_row"  # one row per token, along the first axis
    SEQUENCE = "sequence"  # one entry per sequence, along the first axis
    SHARED = "shared"  # every micro-batch gets the whole
    DERIVED = "derived"  # computed again from the cut by `split_batch_decoder_layers`


_SHAPES = {
    SplitRule.TOKEN: "[..., kT]",
    SplitRule.TOKEN_ROW: "[T, ...]",
    SplitRule.SEQUENCE: "[B, ...]",
}


def batch_field(
    rule: SplitRule,
    *,
    shape: str | None = None,
    integer: bool = False,
    default: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field that declares how it is split.

    Args:
        rule: TOKEN, TOKEN_ROW, SEQUENCE or SHARED; DERIVED is for `ForwardBatch`'s own fields.
        shape: the shapes that it may have, such as "[T] or [3, T]", for T token slots and B
            sequence rows. Other letters stand for any size. Default: what the rule asks for.
        integer: whether its dtype has to be an integer one.
        default: default value, `None` for an optional field.
    """
    if not isinstance(rule, SplitRule):
        raise TypeError(f"batch_field needs a SplitRule, got {rule!r}")
    metadata = {"split": rule, "shape": shape or _SHAPES.get(rule), "integer": integer}
    return dataclasses.field(default=default, metadata=metadata)


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

    token_ids: Array = batch_field(SplitRule.TOKEN, shape="[T]", integer=True)  # int32
    # Places for the rotary embedding, int32; for M-RoPE one of time, height and width each.
    positions: Array = batch_field(SplitRule.TOKEN, shape="[T] or [3, T]", integer=True)
    # int32, the row of each token
    sequence_ids: Array = batch_field(SplitRule.DERIVED, shape="[T]", integer=True)
    # int32, tokens of this step
    query_lens: Array = batch_field(SplitRule.DERIVED, shape="[B]", integer=True)
    # int32, tokens cached before it
    context_lens: Array = batch_field(SplitRule.DERIVED, shape="[B]", integer=True)
    # int32, cumulative query_lens
    cu_query_lens: Array = batch_field(SplitRule.DERIVED, shape="[B+1]", integer=True)
    # int32, the P pages of each sequence
    page_table: Array = batch_field(SplitRule.SEQUENCE, shape="[B, P]", integer=True)
    num_tokens: Array = batch_field(SplitRule.DERIVED, shape="[]", integer=True)  # int32, live
    num_sequences: Array = batch_field(SplitRule.DERIVED, shape="[]", integer=True)  # int32, live
    # Of the model's dtype: taken for tokens with the model's image_token_id in place of their entry
    # in the embedding table.
    inputs_embeds: Array | None = batch_field(SplitRule.TOKEN_ROW, shape="[T, D]", default=None)
    # int32, in place of causal attention. [T]: the first key that a token may see; the last is its
    # own. [2T]: a first and a last key for each token, as for runs of image tokens that attend both
    # ways. A key is told by its place in its sequence, cached tokens included; both ends count. A
    # token sees the keys from first to last that are in the cache by then, those of its own
    # micro-batch included, and none if there are none: its result is then zero. A sliding window
    # bounds the keys before the token further.
    mask_offsets: Array | None = batch_field(
        SplitRule.TOKEN, shape="[T] or [2T]", integer=True, default=None
    )
    # float32, a rotary table of its own for each sequence, in place of the model's: the cosine and
    # the sine that turn the F = dim / 2 pairs of a head at each of L positions (`apply_rotary`).
    # `positions` [T] choose among them.
    rotary_tables: Array | None = batch_field(
        SplitRule.SEQUENCE, shape="[B, 2, L, F]", default=None
    )

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
        page_size: int | None = None,
        **extra: Any,
    ) -> Self:
        """Lay sequences out one after another in host memory (numpy), padded to a bucket.

        Args:
            tokens: the tokens of this step, for each sequence.
            context_lens: tokens of each sequence that are in the cache already.
            pages: the pages of each sequence, in order, from 1 on: page 0 is for padding.
            token_capacity, sequence_capacity, pages_per_sequence: T, B and P of the bucket.
            page_size: tokens of a page; with it, a sequence that its pages do not hold is refused.
            extra: further fields, already padded; or `positions`, in place of the ones that follow
                from the context lengths.

        Raises:
            ValueError: the sequences do not fit the bucket or their pages, the lists differ in
                length, a value is no integer or out of range, or a further field has the wrong
                size.
        """
        whole_number("token_capacity", token_capacity, 1)
        whole_number("sequence_capacity", sequence_capacity, 1)
        whole_number("pages_per_sequence", pages_per_sequence, 1)
        if not len(tokens) == len(context_lens) == len(pages):
            raise ValueError(
                f"pack needs one entry per sequence in each list, got {len(tokens)} token lists, "
                f"{len(context_lens)} context lengths, {len(pages)} page lists"
            )
        lengths, owned = np.array([[len(t) for t in tokens], [len(p) for p in pages]], np.int32)
        total, rows = int(lengths.sum()), len(tokens)
        widest = int(owned.max(initial=0))
        if total > token_capacity or rows > sequence_capacity or widest > pages_per_sequence:
            raise ValueError(
                f"batch of {total} tokens, {rows} sequences and up to {widest} pages a sequence "
                f"does not fit the bucket of {token_capacity} tokens, {sequence_capacity} "
                f"sequences and {pages_per_sequence} pages"
            )
        ids = _integers("token ids", chain.from_iterable(tokens), _LOWEST)
        contexts = _integers("context lengths", context_lens, 0)
        flat_pages = _integers("page ids (page 0 is for padding)", chain.from_iterable(pages), 1)
        _check_pages(lengths, contexts, owned, page_size)

        row, column = np.arange(rows, dtype=np.int32), np.arange(pages_per_sequence)
        token_row = np.repeat(row, lengths)
        ends = np.cumsum(lengths, dtype=np.int32)
        place = np.arange(total, dtype=np.int32) - (ends - lengths)[token_row]
        page_table = np.zeros((sequence_capacity, pages_per_sequence), np.int32)
        page_table[:rows][column < owned[:, None]] = flat_pages
        query_lens = _padded(lengths, sequence_capacity)
        batch = cls(
            token_ids=_padded(ids, token_capacity),
            positions=extra.pop("positions", _padded(contexts[token_row] + place, token_capacity)),
            sequence_ids=_padded(token_row, token_capacity),
            query_lens=query_lens,
            context_lens=_padded(contexts, sequence_capacity),
            cu_query_lens=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            page_table=page_table,
            num_tokens=np.int32(total),
            num_sequences=np.int32(rows),
            **extra,
        )
        batch.check_shapes()
        return batch

    def check_shapes(self) -> None:
        """Refuse fields of the wrong size: a gather would clamp, and give a neighbour's value.

        Shapes are static, so this works on traced arrays too.

        Raises:
            ValueError: names the field, its rule, its shape, and what was expected.
        """
        name = type(self).__name__
        slots, lengths = np.shape(self.token_ids), np.shape(self.query_lens)
        tokens, rows = (shape[-1] if shape else 0 for shape in (slots, lengths))
        if not tokens or not rows:
            raise ValueError(
                f"{name} has token_ids of shape {slots} and query_lens of shape {lengths}: "
                "expected a token slot and a sequence row at least"
            )
        ranks = "; a batch of several ranks is split rank by rank" if len(slots) == 2 else ""
        for field, rule, shape, integer, optional in _declared(type(self)):  # type: ignore[arg-type]
            value = getattr(self, field)
            if shape is None or (value is None and optional):
                continue
            if not hasattr(value, "shape") or not hasattr(value, "dtype"):
                raise ValueError(
                    f"{name}.{field} ({rule.name}) is of type {type(value).__name__}: "
                    f"expected an array {shape}"
                )
            if not any(_fits(value.shape, axes, tokens, rows) for axes in _alternatives(shape)):
                whole = ", k = 1, 2, ..." if "k" in shape else ""
                raise ValueError(
                    f"{name}.{field} ({rule.name}) has shape {value.shape}: expected {shape} with "
                    f"T = {tokens} token slots and B = {rows} sequence rows{whole}{ranks}"
                )
            if integer and np.dtype(value.dtype).kind not in "iu":
                raise ValueError(
                    f"{name}.{field} ({rule.name}) has dtype {value.dtype}: expected integers"
                )


@functools.cache
def _declared(cls: type) -> list[tuple[str, SplitRule, str | None, bool, bool]]:
    """Name, rule, shape, whether integer and whether optional, of each field."""
    return [
        (
            field.name,
            field.metadata["split"],
            field.metadata["shape"],
            field.metadata["integer"],
            field.default is None,
        )
        for field in dataclasses.fields(cls)
    ]


@functools.cache
def _alternatives(shape: str) -> list[list[str]]:
    """The axes of each shape of "[T] or [3, T]"."""
    return [[axis for axis in one.strip("[]").split(", ") if axis] for one in shape.split(" or ")]


def _fits(shape: tuple[int, ...], axes: Sequence[str], tokens: int, rows: int) -> bool:
    if "..." in axes:
        named = [axis for axis in axes if axis != "..."]
        free = len(shape) - len(named)
        if free < 0:
            return False
        shape = shape[free:] if axes[0] == "..." else shape[: len(named)]
        axes = named
    sizes = {"T": tokens, "2T": 2 * tokens, "B": rows, "B+1": rows + 1}
    return len(shape) == len(axes) and all(
        (size > 0 and size % tokens == 0)
        if axis == "kT"
        else size == (int(axis) if axis.isdigit() else sizes.get(axis, size))
        for size, axis in zip(shape, axes, strict=True)
    )


def _integers(what: str, values: Any, least: int) -> np.ndarray:
    """[N] int32; ValueError for anything else or below `least`."""
    given = list(values)
    try:
        found = np.array(given) if given else np.zeros(0, np.int32)
    except (ValueError, TypeError, OverflowError):
        found = np.array(given, dtype=object)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        odd = next((v for v in given if isinstance(v, bool) or not hasattr(v, "__index__")), given)
        raise ValueError(f"{what} must be integers, got {odd!r}")
    if found.size and not least <= found.min() <= found.max() <= _HIGHEST:
        odd = next(v for v in given if not least <= v <= _HIGHEST)
        raise ValueError(f"{what} must be from {least} to {_HIGHEST}, got {odd}")
    return found.astype(np.int32)


def _check_pages(
    lengths: np.ndarray, contexts: np.ndarray, owned: np.ndarray, page_size: int | None
) -> None:
    """ValueError for a sequence that its pages do not hold."""
    keys = lengths.astype(np.int64) + contexts
    if page_size is None:
        room, held = np.where(owned > 0, _HIGHEST, 0), "any token"
    else:
        whole_number("page_size", page_size, 1)
        room = owned.astype(np.int64) * page_size
        held = f"more than {page_size} tokens a page"
    for row in np.flatnonzero(keys > room)[:1]:
        raise ValueError(
            f"sequence {row} has {contexts[row]} tokens in the cache and {lengths[row]} new ones: "
            f"its {owned[row]} page(s) do not hold {held}"
        )


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """[size], zeros at the end."""
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


def stack_batches(batches: Sequence[ForwardBatch]) -> ForwardBatch:
    """Join the batches of R ranks: every leaf gets a leading axis [R, ...] (numpy).

    Raises:
        ValueError: no batches, or batches of different classes, fields or shapes.
    """
    if not batches:
        raise ValueError("stack_batches needs a batch for each rank, got none")
    first = batches[0]
    for rank, batch in enumerate(batches):
        if type(batch) is not type(first):
            raise ValueError(
                f"batches of all ranks must be of one class: rank 0 has {type(first).__name__}, "
                f"rank {rank} {type(batch).__name__}"
            )
        for field in dataclasses.fields(batch):
            shapes = [jax.tree.map(np.shape, getattr(one, field.name)) for one in (first, batch)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{type(first).__name__}.{field.name} must have one shape on all ranks: "
                    f"rank 0 has {shapes[0]}, rank {rank} {shapes[1]}"
                )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

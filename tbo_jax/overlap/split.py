"""Cut a batch into micro-batches: a pure function of the batch, with static shapes.

The idea is FastDeploy's `split_batch_decoder_layers` (PR #7165). There the cut needs the values on
the host; here the cut is a traced scalar and the capacities are static, so that one compiled step
serves every batch of its bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.overlap.batch import ForwardBatch, SplitRule
from tbo_jax.overlap.checks import whole_number

Batch = TypeVar("Batch", bound=ForwardBatch)


def split_batch_decoder_layers(
    batch: Batch,
    num_micro_batches: int = 2,
    image_token_id: int | None = None,
    cut: int | Sequence[int] | jax.Array | None = None,
    *,
    capacity: int | None = None,
    keep_spans: bool = False,
) -> tuple[Batch, ...]:
    """Cut a batch of n live tokens into micro-batches of sizes that differ by at most one.

    Two micro-batches are cut at token ceil(n / 2), also inside a sequence: the later micro-batch
    then sees that sequence with its context grown by what the earlier ones took. With fewer tokens
    than micro-batches the first ones stay empty, so one token gives (empty, whole batch). Each
    micro-batch speaks of its own rows: `sequence_ids`, `cu_query_lens` and `page_table` are
    relabelled, and rows without tokens are left out.

    Args:
        batch: a batch (no rank axis), T tokens, B sequences; numpy, jax or traced arrays.
        num_micro_batches: K >= 1.
        image_token_id: id of image-patch tokens. A run of them inside one sequence is never cut;
            the admissible cut nearest the ideal one is taken, the earlier of two at equal distance.
            Without any admissible cut all tokens fall into the last micro-batch.
        cut: the cut itself, for a caller that knows the tokens: first token of the second
            micro-batch, or K - 1 of them, non-decreasing, each in [0, n]. Not together with
            `image_token_id`.
        capacity: static number of token slots C of each micro-batch. Default: ceil(T / K), or T
            when the cut can lie anywhere (`image_token_id`, `keep_spans` or `cut` given).
        keep_spans: never cut between a token and a later one that it may see, as `mask_offsets`
            [2T] say; for the rest as with `image_token_id`. Else the keys that come in a later
            micro-batch are not seen.

    Returns:
        K batches of the same class with C token slots and min(B, C) rows.

    Raises:
        ValueError: bad `num_micro_batches`, `capacity` or `image_token_id`; a field of the wrong
            size; or (where their values are known) counts of the batch that contradict each other,
            and cuts that decrease, lie outside [0, n] or give a micro-batch of more than C tokens.
            Inside jit the caller answers for values: tokens beyond C would be lost.
    """
    if not isinstance(batch, ForwardBatch):
        raise ValueError(f"a split needs a ForwardBatch, got {type(batch).__name__}")
    num_micro_batches = whole_number("num_micro_batches", num_micro_batches, 1)
    if image_token_id is not None:
        image_token_id = whole_number("image_token_id", image_token_id, 0)
        if image_token_id > np.iinfo(np.int32).max:
            raise ValueError(f"image_token_id must be an int32, got {image_token_id}")
    if not isinstance(keep_spans, bool):
        raise ValueError(f"keep_spans must be True or False, got {keep_spans!r}")
    batch.check_shapes()
    _check_counts(batch)
    for name, given in {"image_token_id": image_token_id, "keep_spans": keep_spans or None}.items():
        if cut is not None and given is not None:
            raise ValueError(f"give cut or {name}, not both: a given cut is taken as it is")
    tokens = batch.token_capacity
    balanced = -(-tokens // num_micro_batches)
    free = cut is not None or image_token_id is not None or keep_spans
    if capacity is None:
        capacity = tokens if free else balanced
    elif not free and whole_number("capacity", capacity, 1) < balanced:
        raise ValueError(
            f"capacity {capacity} is too small: {tokens} tokens in {num_micro_batches} "
            f"micro-batches need {balanced} slots each"
        )
    capacity = whole_number("capacity", capacity, 1)
    if cut is not None:
        inner = _given_cuts(cut, num_micro_batches)
    elif free:
        inside = jnp.zeros(tokens, bool)
        if image_token_id is not None:
            inside |= _inside_images(batch, image_token_id)
        if keep_spans:
            inside |= _inside_spans(batch)
        inner = _cuts_outside(batch, num_micro_batches, inside)
    else:
        inner = _balanced_cuts(batch.num_tokens, num_micro_batches)
    end = jnp.asarray(batch.num_tokens, jnp.int32)[None]
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), inner, end])
    _check_bounds(bounds, capacity)
    return tuple(_take(batch, bounds[k], bounds[k + 1], capacity) for k in range(num_micro_batches))


def gather_tokens(values: Sequence[jax.Array], batches: Sequence[ForwardBatch], tokens: jax.Array):
    """Rows of the uncut batch from what its micro-batches computed.

    Args:
        values: one array [C, ...] per micro-batch.
        batches: the micro-batches, as `split_batch_decoder_layers` gave them.
        tokens: [N] int32, indices into the live tokens of the uncut batch.

    Returns:
        [N, ...], entry i is the row of token `tokens[i]`.

    Raises:
        ValueError: values and micro-batches differ in number or size, `tokens` is no list of
            integers, or (where they are known) they are not all live tokens.
    """
    _check_values(values, batches, tokens)
    sizes = jnp.stack([jnp.asarray(b.num_tokens, jnp.int32) for b in batches])
    ends = jnp.cumsum(sizes)
    owner = jnp.sum(ends[:-1] <= tokens[:, None], axis=1, dtype=jnp.int32)
    local = tokens - (ends - sizes)[owner]
    return jnp.concatenate(values)[owner * values[0].shape[0] + local]


def _check_values(values, batches, tokens) -> None:
    if len(values) != len(batches) or not values:
        raise ValueError(
            f"gather_tokens needs one array for each micro-batch, got {len(values)} arrays and "
            f"{len(batches)} micro-batches"
        )
    for number, (value, batch) in enumerate(zip(values, batches, strict=True)):
        expected = batches[0].token_capacity, *values[0].shape[1:]
        if value.shape != expected or batch.token_capacity != expected[0]:
            raise ValueError(
                f"the array of micro-batch {number} has shape {value.shape} for "
                f"{batch.token_capacity} token slots: expected {expected} for all"
            )
        if value.dtype != values[0].dtype:
            raise ValueError(
                f"the array of micro-batch {number} has dtype {value.dtype}: expected "
                f"{values[0].dtype}, that of the first"
            )
    if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [N], got shape {tokens.shape} of {tokens.dtype}")
    counts = [batch.num_tokens for batch in batches]
    if not any(isinstance(known, jax.core.Tracer) for known in (tokens, *counts)) and tokens.size:
        live = sum(map(int, counts))
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= live:
            raise ValueError(
                f"tokens must be indices into {live} live tokens, got {lowest} to {highest}"
            )


def _balanced_cuts(num_tokens, count: int) -> jax.Array:
    """[K - 1] ideal cuts: ceil(k n / K), or the last n micro-batches one token each when n < K."""
    n = jnp.asarray(num_tokens, jnp.int32)
    k = jnp.arange(1, count, dtype=jnp.int32)
    # n k / K without the product: it would overflow int32 first where it never should.
    whole, rest = n // count, n % count
    return jnp.where(n < count, jnp.maximum(k - (count - n), 0), whole * k + -(-rest * k // count))


def _given_cuts(cut, count: int) -> jax.Array:
    try:
        given = jnp.asarray(cut, jnp.int32 if isinstance(cut, list | tuple) and not cut else None)
        integer = jnp.issubdtype(given.dtype, jnp.integer)
    except (TypeError, ValueError, OverflowError):
        integer = False
    if not integer:
        raise ValueError(f"a cut must be a number of tokens, or a list of them, got {cut!r}")
    cuts = jnp.atleast_1d(given).astype(jnp.int32)
    if cuts.shape != (count - 1,):
        raise ValueError(f"{count} micro-batches need {count - 1} cut(s), got shape {cuts.shape}")
    return cuts


def _inside_images(batch: ForwardBatch, image_token_id: int) -> jax.Array:
    """[T] bool: whether a cut before a token would cut a run of image tokens."""
    ids, rows = jnp.asarray(batch.token_ids), jnp.asarray(batch.sequence_ids)
    image = ids == image_token_id
    inside = image[1:] & image[:-1] & (rows[1:] == rows[:-1])
    return jnp.concatenate([jnp.zeros(1, bool), inside])


def _inside_spans(batch: ForwardBatch) -> jax.Array:
    """[T] bool: whether a token before a cut there may see one after it."""
    slots = batch.token_capacity
    if batch.mask_offsets is None or batch.mask_offsets.shape[-1] != 2 * slots:
        found = None if batch.mask_offsets is None else batch.mask_offsets.shape
        raise ValueError(f"keep_spans needs mask_offsets [2T] for T = {slots}, got shape {found}")
    token = jnp.arange(slots, dtype=jnp.int32)
    live = token < batch.num_tokens
    row = jnp.where(live, jnp.asarray(batch.sequence_ids), 0)
    starts = jnp.asarray(batch.cu_query_lens)
    place = jnp.asarray(batch.context_lens)[row] + token - starts[row]
    last = jnp.asarray(batch.mask_offsets).reshape(slots, 2)[:, 1]
    # Compared before anything is taken away or added: `last` may be any int32.
    ahead = jnp.minimum(jnp.maximum(last, place) - place, starts[row + 1] - 1 - token)
    seen = token + ahead
    furthest = jax.lax.cummax(jnp.where(live, seen, 0))
    return jnp.concatenate([jnp.zeros(1, bool), furthest[:-1] >= token[1:]])


def _cuts_outside(batch: ForwardBatch, count: int, inside: jax.Array) -> jax.Array:
    """[K - 1] cuts, each the nearest to its ideal place where `inside` [T] is false."""
    position = jnp.arange(batch.token_capacity, dtype=jnp.int32)
    admissible = (position > 0) & (position < batch.num_tokens) & ~inside
    ideal = _balanced_cuts(batch.num_tokens, count)
    distance = jnp.abs(position[None, :] - ideal[:, None])
    distance = jnp.where(admissible[None, :], distance, batch.token_capacity + 1)
    nearest = jnp.argmin(distance, axis=1).astype(jnp.int32)
    # An ideal cut at 0 leaves a micro-batch empty on purpose (fewer tokens than micro-batches).
    return jnp.where(admissible.any() & (ideal > 0), nearest, 0)


def _check_counts(batch: ForwardBatch) -> None:
    """ValueError if lengths, counts and rows contradict each other, as far as they are known."""
    names = ["num_tokens", "num_sequences", "query_lens", "context_lens", "cu_query_lens"]
    names += ["sequence_ids", "page_table"]
    fields = [getattr(batch, name) for name in names]
    if any(isinstance(field, jax.core.Tracer) for field in fields):
        return
    *counts, lengths, contexts, ends, row_of, pages = map(np.asarray, fields)
    tokens, rows = map(int, counts)
    name = type(batch).__name__
    for what, count, most in (
        ("num_tokens", tokens, batch.token_capacity),
        ("num_sequences", rows, batch.sequence_capacity),
    ):
        if not 0 <= count <= most:
            raise ValueError(f"{name}.{what} must be from 0 to {most}, got {count}")
    lengths = lengths[:rows]
    for what, values in (("query_lens", lengths), ("context_lens", contexts[:rows]),
                         ("page_table", pages[:rows])):  # fmt: skip
        if values.min(initial=0) < 0:
            raise ValueError(f"{name}.{what} must not be negative, got {values.min()}")
    if lengths.sum() != tokens:
        raise ValueError(
            f"{name}.query_lens must add up to num_tokens = {tokens}, got {lengths.tolist()}"
        )
    if ends[: rows + 1].tolist() != [0, *np.cumsum(lengths).tolist()]:
        raise ValueError(
            f"{name}.cu_query_lens must be the sums of query_lens {lengths.tolist()}, "
            f"got {ends[: rows + 1].tolist()}"
        )
    if not np.array_equal(row_of[:tokens], np.repeat(np.arange(rows), lengths)):
        raise ValueError(
            f"{name}.sequence_ids must be the row of each token for query_lens "
            f"{lengths.tolist()}, got {row_of[:tokens].tolist()}"
        )


def _check_bounds(bounds: jax.Array, capacity: int) -> None:
    if isinstance(bounds, jax.core.Tracer):
        return
    values = np.asarray(bounds)
    sizes = np.diff(values)
    if sizes.min(initial=0) < 0 or values.min() < 0:
        raise ValueError(f"cuts must not decrease and lie in [0, {values[-1]}], got {values[1:-1]}")
    if sizes.max(initial=0) > capacity:
        raise ValueError(f"a micro-batch of {sizes.max()} tokens exceeds the capacity {capacity}")


def _take(batch: Batch, start: jax.Array, stop: jax.Array, capacity: int) -> Batch:
    """The micro-batch of tokens [start, stop)."""
    rows = min(batch.sequence_capacity, capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    live = slot < stop - start
    source = jnp.minimum(start + slot, batch.token_capacity - 1)

    row = jnp.arange(batch.sequence_capacity, dtype=jnp.int32)
    lengths = jnp.where(row < batch.num_sequences, jnp.asarray(batch.query_lens), 0)
    row_stop = jnp.cumsum(lengths)
    row_start = row_stop - lengths
    taken = jnp.maximum(jnp.minimum(row_stop, stop) - jnp.maximum(row_start, start), 0)
    before = jnp.clip(start - row_start, 0, lengths)  # what earlier micro-batches took of the row
    kept = taken > 0
    (chosen,) = jnp.nonzero(kept, size=rows, fill_value=0)
    filled = jnp.arange(rows, dtype=jnp.int32) < kept.sum(dtype=jnp.int32)
    relabelled = jnp.cumsum(kept, dtype=jnp.int32) - 1
    query_lens = jnp.where(filled, taken[chosen], 0).astype(jnp.int32)
    context_lens = jnp.asarray(batch.context_lens)[chosen] + before[chosen]
    zero = jnp.zeros(1, jnp.int32)
    sequence_ids = jnp.where(live, relabelled[jnp.asarray(batch.sequence_ids)[source]], 0)
    fields = {
        "sequence_ids": sequence_ids.astype(jnp.int32),
        "query_lens": query_lens,
        "context_lens": jnp.where(filled, context_lens, 0).astype(jnp.int32),
        "cu_query_lens": jnp.concatenate([zero, jnp.cumsum(query_lens, dtype=jnp.int32)]),
        "num_tokens": (stop - start).astype(jnp.int32),
        "num_sequences": kept.sum(dtype=jnp.int32),
    }
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        rule = field.metadata["split"]
        if rule is SplitRule.SHARED or value is None:
            fields[field.name] = value
        elif rule is SplitRule.TOKEN:
            fields[field.name] = _take_tokens(jnp.asarray(value), batch, source, live)
        elif rule is SplitRule.TOKEN_ROW:
            rows_of = jnp.asarray(value)[source]
            mask = live.reshape(-1, *[1] * (rows_of.ndim - 1))
            fields[field.name] = jnp.where(mask, rows_of, jnp.zeros_like(rows_of))
        elif rule is SplitRule.SEQUENCE:
            value = jnp.asarray(value)[chosen]
            mask = filled.reshape(-1, *[1] * (value.ndim - 1))
            fields[field.name] = jnp.where(mask, value, jnp.zeros_like(value))
    return type(batch)(**fields)


def _take_tokens(value: jax.Array, batch: ForwardBatch, source, live) -> jax.Array:
    """Token entries along the last axis, which holds a whole number of entries per token."""
    *lead, size = value.shape
    per_token = size // batch.token_capacity
    grouped = value.reshape(*lead, batch.token_capacity, per_token)[..., source, :]
    grouped = jnp.where(live[:, None], grouped, jnp.zeros_like(grouped))
    return grouped.reshape(*lead, source.shape[0] * per_token)

"""What a request's options do to its logits before the sampler, and the log-probabilities it asks.

What follows from a request alone (its bias, the tokens it may not have) and how often it had each
token lie in a row of two arrays on the device, `RowTables`. A step is told the row of each request
and a few numbers; a request that asks for nothing has no row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_WORDS = 64  # of several tokens, of one request, each form of a word counted
_NO_WORD = 2**31 - 1  # no token of any vocabulary
_NOWHERE = 2**31 - 1  # no row of any table

# A number of `RowTables.marks`: two bits, and above them how often the token was generated.
ENDS = 1  # the token ends the request, and is ruled out until it has its least number of tokens
PROMPTED = 2  # the token is in the prompt
GENERATED = 4  # added each time that the token is generated


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowTables:
    """What is known of the requests that change their logits. S: rows, V: vocabulary."""

    bias: jax.Array  # [S, V] float32, added to the logits; -inf rules a token out
    marks: jax.Array  # [S, V] int32, of `ENDS`, `PROMPTED` and `GENERATED`

    @staticmethod
    def shapes(rows: int, vocabulary: int) -> RowTables:
        """The shapes of the tables."""
        shape = (rows, vocabulary)
        bias = jax.ShapeDtypeStruct(shape, np.float32)
        return RowTables(bias, jax.ShapeDtypeStruct(shape, np.int32))  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowUpdate:
    """New contents of some rows of `RowTables`. S: its rows, N: most entries of each kind."""

    cleared: Any  # [S] int32; 0: kept, 1: nothing is biased or marked, 2: and all is ruled out
    bias: Any  # [N, 3] int32: row, token, bits of the float32 that stands there from now on
    marks: Any  # [N, 3] int32: row, token, what is added

    @staticmethod
    def empty(rows: int, entries: int) -> RowUpdate:
        """One on the host that changes nothing."""
        nowhere = np.full((entries, 3), _NOWHERE, np.int32)
        return RowUpdate(np.zeros(rows, np.int32), nowhere, nowhere.copy())


def update_rows(tables: RowTables, update: RowUpdate) -> RowTables:
    """The tables with `update`: first rows are cleared, then entries are written."""
    cleared = update.cleared[:, None]
    bias = jnp.where(cleared == 0, tables.bias, jnp.where(cleared == 2, -jnp.inf, 0.0))
    marks = jnp.where(cleared == 0, tables.marks, 0)
    row, token, bits = (update.bias[:, i] for i in range(3))
    values = lax.bitcast_convert_type(bits, jnp.float32)
    bias = bias.at[row, token].set(values, mode="drop")
    row, token, added = (update.marks[:, i] for i in range(3))
    return RowTables(bias, marks.at[row, token].add(added, mode="drop"))


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What one row of a step's logits is told of its request."""

    row: int = _NOWHERE  # of `RowTables`
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    may_not_end: bool = False
    last: int = 0  # the token before; below 0 the `unread_token` of a row of the step before
    counts: bool = False  # `last` was generated, and is not marked yet
    words: tuple[tuple[int, int], ...] = ()  # (a, b): token b is ruled out after a, if a < 0 always


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptionInputs:
    """The `RowOptions` of a step's rows as arrays. B: rows, padding included."""

    row: Any  # [B] int32
    repetition_penalty: Any  # [B] float32
    presence_penalty: Any  # [B] float32
    frequency_penalty: Any  # [B] float32
    may_not_end: Any  # [B] int32
    last: Any  # [B] int32
    counts: Any  # [B] int32
    after: Any  # [B, MAX_WORDS] int32
    words: Any  # [B, MAX_WORDS] int32

    @staticmethod
    def pack(rows: Mapping[int, RowOptions], num_rows: int) -> np.ndarray:
        """The bits of all fields, [num_rows, 7 + 2 MAX_WORDS] int32; other rows ask nothing."""
        columns = [f.name for f in dataclasses.fields(OptionInputs)][:-2]
        packed = np.zeros((num_rows, len(columns) + 2 * MAX_WORDS), np.int32)
        packed[:, len(columns) :] = _NO_WORD
        packed[:, 0] = _NOWHERE
        packed[:, 1] = np.float32(1.0).view(np.int32)
        for at, row in rows.items():
            packed_row = packed[at]
            for index, name in enumerate(columns):
                value = getattr(row, name)
                is_float = isinstance(value, float)
                packed_row[index] = np.float32(value).view(np.int32) if is_float else value
            for index, (after, word) in enumerate(row.words, len(columns)):
                packed_row[index], packed_row[index + MAX_WORDS] = after, word
        return packed

    @staticmethod
    def unpack(packed: jax.Array) -> OptionInputs:
        """The fields of what `pack` gave."""
        many = 2 * MAX_WORDS
        row, repetition, presence, frequency, may_not_end, last, counts = packed[:, :-many].T
        return OptionInputs(
            row=row,
            repetition_penalty=lax.bitcast_convert_type(repetition, jnp.float32),
            presence_penalty=lax.bitcast_convert_type(presence, jnp.float32),
            frequency_penalty=lax.bitcast_convert_type(frequency, jnp.float32),
            may_not_end=may_not_end,
            last=last,
            counts=counts,
            after=packed[:, -many:-MAX_WORDS],
            words=packed[:, -MAX_WORDS:],
        )


def change_logits(
    logits: jax.Array,
    inputs: OptionInputs,
    before: jax.Array,
    bias: jax.Array,
    marks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The logits with what their requests ask for, and the marks with the tokens before.

    In the order of vLLM's sampler: what is ruled out (`allowed_token_ids`, `bad_words`,
    `min_tokens`) and `logit_bias`, then the repetition penalty, then those for frequency and
    presence. A row without options keeps its logits bit for bit, but for the sign of zeros.

    Args:
        logits: [B, V], any float type.
        inputs: of B rows.
        before: [W] int32, tokens of the step before, which `inputs.last` may name.
        bias, marks: `RowTables`, whose rows `inputs.row` names.

    Returns:
        [B, V] float32, and the marks.
    """
    logits = logits.astype(jnp.float32)
    last = jnp.where(inputs.last < 0, jnp.take(before, -1 - inputs.last, mode="clip"), inputs.last)
    marked = jnp.where(inputs.counts > 0, inputs.row, _NOWHERE)
    marks = marks.at[marked, last].add(GENERATED, mode="drop")

    added = jnp.take(bias, inputs.row, axis=0, mode="fill", fill_value=0.0)
    mine = jnp.take(marks, inputs.row, axis=0, mode="fill", fill_value=0)
    too_soon = (inputs.may_not_end[:, None] > 0) & (mine & ENDS > 0)
    # Added, not put in place of the logit: what is not finite stays so.
    logits = logits + added + jnp.where(too_soon, -jnp.inf, 0.0)

    penalty = inputs.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(mine & ~ENDS > 0, penalised, logits)
    times = mine >> (GENERATED.bit_length() - 1)
    logits = logits - inputs.frequency_penalty[:, None] * times.astype(jnp.float32)
    logits = logits - jnp.where(times > 0, inputs.presence_penalty[:, None], 0.0)

    fits = (inputs.after < 0) | (inputs.after == last[:, None])
    rows = jnp.arange(logits.shape[0])[:, None]
    words = jnp.where(fits, inputs.words, _NO_WORD)
    return logits.at[rows, words].add(-jnp.inf, mode="drop"), marks


def describe(logits: jax.Array, tokens: jax.Array, most: int) -> jax.Array:
    """Log-probabilities of each row, [B, 2 + 2 most] int32; `read_described` reads them.

    Args:
        logits: [B, V] of the model; their log_softmax is computed in float32.
        tokens: [B] int32, those that were chosen; of one below 0 it means nothing.
        most: how many of the most probable tokens, at most V.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)
    rank = jnp.sum((logits >= chosen).astype(jnp.int32), axis=1, keepdims=True)
    best, ids = lax.top_k(logits, most)
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    values = lax.bitcast_convert_type(jnp.concatenate([chosen, best], axis=1) - total, jnp.int32)
    return jnp.concatenate([values, rank, ids.astype(jnp.int32)], axis=1)

"""What the device knows of the rows of the engine, and the step that reads it and goes on from it.

A row has a number of tokens in the cache, its last token, its pages, and how to sample; where
drafts are found for it, all its tokens. Each step makes its batch of these, samples, and leaves
them as the next one needs them. So the host, which plans that step while this one runs, sends only
what the device cannot know: which rows take part, tokens of prompts, new pages, and new requests.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.engine.prompt_lookup import TO_FIND, prompt_lookup
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.sampling.draw import SamplingInputs, sample
from tbo_jax.sampling.options import describe
from tbo_jax.step.forward import EachToken
from tbo_jax.step.program import Forward
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig

LAST_TOKEN = -1  # among the tokens of a step: the last one of its sequence, wherever it is known
# Columns of `RowState.numbers`; the last of `SamplingInputs.packed` counts the tokens.
CONTEXT, TOKEN, SAMPLING, COUNT = 0, 1, slice(2, 9), 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """The rows of a rank. S: rows, P: pages of a sequence."""

    numbers: Any  # [S, 9] int32: tokens in the cache, last token, packed `SamplingInputs`
    pages: Any  # [S, P] int32
    history: Any = None  # [S, C] int32, the tokens; None where no drafts are found

    @staticmethod
    def shapes(rows: int, cache: CacheConfig, history: bool = False) -> RowState:
        """The shapes of a rank's state, with or without the tokens of rows."""
        shapes = [(rows, SAMPLING.stop), (rows, cache.pages_per_sequence)]
        shapes += [(rows, cache.pages_per_sequence * cache.page_size)] * history
        return RowState(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowChanges:
    """New contents of some rows. U: how many; those that are no rows (S) say nothing."""

    rows: Any  # [U] int32
    numbers: Any  # [U, 9] int32; with a context below 0 all but the pages stay as they are
    pages: Any  # [U, P] int32
    history: Any = None  # [U, C] int32, or None

    @staticmethod
    def shapes(count: int, state: RowState) -> RowChanges:
        """The shapes of the changes of a rank's state, given as shapes."""
        columns = jax.tree.map(lambda leaf: leaf.shape[1:], state)
        shapes = [(count,), (count, *columns.numbers), (count, *columns.pages)]
        if state.history is not None:
            shapes.append((count, *columns.history))
        return RowChanges(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What the host tells of a step. T: token slots, B: sequences, M: pages that one may get."""

    tokens: Any  # [T] int32, sequence after sequence, or `LAST_TOKEN`
    # [3, B] int32: tokens of each sequence, its row (S: none), whether it samples; of a bucket with
    # drafts [4, B], how many of the tokens are drafts.
    layout: Any
    new_pages: Any  # [B, M, 2] int32: place in the page table, and the page; 0: none
    # [T] int32, the tokens after those of `tokens`, whose log-probabilities are wanted; -1: not.
    targets: Any = None

    @staticmethod
    def shapes(bucket: Bucket, cache: CacheConfig, targets: bool = False) -> StepInputs:
        """The shapes of a rank's inputs."""
        # Drafts of two steps may be in play, and the token of each.
        most = -(-(1 + 2 * bucket.drafts) // cache.page_size)
        columns = 3 + (bucket.drafts > 0)
        shapes = [(bucket.tokens,), (columns, bucket.sequences), (bucket.sequences, most, 2)]
        shapes += [(bucket.tokens,)] * targets
        return StepInputs(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledStep:
    """What a step gives beside the attention buffers. L: `sampled_rows`."""

    logits: Any  # float32 [L, V]
    tokens: Any  # [S] int32, of each sequence the last one sampled that stands; 0 without logits
    readable: Any  # [L] int32: what was sampled, with `NOT_FINITE`
    state: RowState
    counts: Any = None  # [B] int32, of a bucket with drafts: how many of a sequence's tokens stand
    drafts: Any = None  # [B, D] int32, of such a bucket: those that were verified
    described: Any = None  # [T, 2 + 2N] int32, of `targets` (`sampling.options.describe`)


def sampled_rows(bucket: Bucket) -> int:
    """Rows of the logits: for each sequence one, and one for each draft that it may have."""
    return bucket.sequences * (1 + bucket.drafts)


def change_rows(state: RowState, changes: RowChanges) -> RowState:
    """The state with the contents of some rows replaced."""
    stay = changes.numbers[:, CONTEXT] < 0
    others = jnp.where(stay, len(state.pages), changes.rows)
    history = state.history
    if history is not None:
        history = history.at[others].set(changes.history, mode="drop")
    return RowState(
        state.numbers.at[others].set(changes.numbers, mode="drop"),
        state.pages.at[changes.rows].set(changes.pages, mode="drop"),
        history,
    )


def run_step(
    bucket: Bucket,
    forward: Forward,
    state: RowState,
    inputs: StepInputs,
    prompt_logprobs: int | None = None,
) -> tuple[SampledStep, Any]:
    """A step of a rank: its batch, logits, tokens and state after it; and the buffers.

    With `prompt_logprobs` it describes the targets, with so many of the most probable tokens.
    """
    state = _with_pages(state, inputs)
    batch = _batch_of(bucket, state, inputs)
    slots = drafts = None
    if bucket.drafts:
        of_sequences = _logit_slots(bucket, inputs)
        slots, drafts = of_sequences.reshape(-1), batch.token_ids[of_sequences[:, 1:]]
    if prompt_logprobs is None:
        logits, buffers = forward(batch, slots)
        return _sampled(bucket, state, inputs, logits, drafts), buffers
    each = EachToken(inputs.targets, functools.partial(describe, most=prompt_logprobs))
    (logits, described), buffers = forward(batch, slots, each)
    step = _sampled(bucket, state, inputs, logits, drafts)
    return dataclasses.replace(step, described=described), buffers


def needed_again(inputs: Any) -> Any:
    """What `sample_again` takes of a step's inputs: the tokens do not matter.

    So steps with as many sequences and drafts share a program, whatever token slots they have.
    """
    return dataclasses.replace(inputs, tokens=None, targets=None)


def sample_again(
    bucket: Bucket,
    state: RowState,
    inputs: StepInputs,
    logits: jax.Array,
    drafts: jax.Array | None = None,
) -> SampledStep:
    """What `run_step` gives for other logits, from the state before it and `needed_again`.

    With drafts these are the step's own.
    """
    return _sampled(bucket, _with_pages(state, inputs), inputs, logits, drafts)


def _with_pages(state: RowState, inputs: StepInputs) -> RowState:
    place, page = inputs.new_pages[..., 0], inputs.new_pages[..., 1]
    rows = jnp.where(page > 0, inputs.layout[1][:, None], len(state.pages))
    pages = state.pages.at[rows, place].set(page, mode="drop")
    return dataclasses.replace(state, pages=pages)


def _batch_of(bucket: Bucket, state: RowState, inputs: StepInputs) -> ForwardBatch:
    lengths, rows = inputs.layout[0], inputs.layout[1]
    numbers = jnp.take(state.numbers, rows, axis=0, mode="fill", fill_value=0)
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    slot, total = jnp.arange(bucket.tokens, dtype=jnp.int32), ends[-1]
    live = slot < total
    one_each = bucket.decode and not bucket.drafts
    sequence = jnp.where(live, slot if one_each else _sequence_of_slots(bucket, lengths), 0)
    tokens = jnp.where(inputs.tokens == LAST_TOKEN, numbers[sequence, TOKEN], inputs.tokens)
    if bucket.drafts and state.history is not None:
        history = jnp.take(state.history, rows, axis=0, mode="fill", fill_value=0)
        drafts = prompt_lookup(history, numbers[:, CONTEXT] + 1, bucket.drafts)
        number = jnp.clip(slot - starts[sequence] - 1, 0, bucket.drafts - 1)
        tokens = jnp.where(inputs.tokens == TO_FIND, drafts[sequence, number], tokens)
    positions = numbers[sequence, CONTEXT] + slot - starts[sequence]
    return ForwardBatch(
        token_ids=jnp.where(live, tokens, 0),
        positions=jnp.where(live, positions, 0),
        sequence_ids=sequence,
        query_lens=lengths,
        context_lens=numbers[:, CONTEXT],
        cu_query_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        page_table=jnp.take(state.pages, rows, axis=0, mode="fill", fill_value=0),
        num_tokens=total,
        num_sequences=jnp.sum((lengths > 0).astype(jnp.int32)),
    )


def _sequence_of_slots(bucket: Bucket, lengths: jax.Array) -> jax.Array:
    """The sequence of each token slot [T], of lengths [B]; that of padding is any."""
    number = jnp.arange(bucket.sequences, dtype=jnp.int32)
    return jnp.repeat(number, lengths, total_repeat_length=bucket.tokens)


def _logit_slots(bucket: Bucket, inputs: StepInputs) -> jax.Array:
    """The token slots whose logits are wanted, [B, 1 + D]: before the drafts, and of each."""
    lengths, drafts = inputs.layout[0], inputs.layout[3]
    first = jnp.cumsum(lengths) - 1 - drafts
    slots = first[:, None] + jnp.arange(1 + bucket.drafts, dtype=jnp.int32)
    return jnp.clip(slots, 0, bucket.tokens - 1)


def _sampled(
    bucket: Bucket,
    state: RowState,
    inputs: StepInputs,
    logits: jax.Array,
    drafts: jax.Array | None,
) -> SampledStep:
    lengths, rows, samples = inputs.layout[0], inputs.layout[1], inputs.layout[2]
    known = jnp.take(state.numbers, rows, axis=0, mode="fill", fill_value=0)
    how = SamplingInputs.unpack(known[:, SAMPLING])
    if drafts is None:
        readable, counts = sample(logits, how), None
        sampled, count, computed = readable[:, None], samples, lengths
    else:
        sampled, count = _verified(inputs, how, logits, drafts)
        readable, counts = sampled.reshape(-1), count
        computed = lengths - inputs.layout[3] + jnp.maximum(count - 1, 0)
    sampled = jnp.maximum(sampled, 0)
    tokens = jnp.take_along_axis(sampled, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(samples > 0, tokens, known[:, TOKEN])
    numbers = known.at[:, CONTEXT].add(computed).at[:, TOKEN].set(last).at[:, COUNT].add(count)
    history = state.history
    if history is not None:
        number = jnp.arange(sampled.shape[1], dtype=jnp.int32)
        # After those that were known: the last of them is the first that is computed, or after it.
        place = (numbers[:, CONTEXT] - count + 1)[:, None] + number
        place = jnp.where(number < count[:, None], place, history.shape[1])
        history = history.at[rows[:, None], place].set(sampled, mode="drop")
    state = RowState(state.numbers.at[rows].set(numbers, mode="drop"), state.pages, history)
    padding = len(state.numbers) - len(tokens)
    return SampledStep(logits, jnp.pad(tokens, (0, padding)), readable, state, counts, drafts)


def _verified(
    inputs: StepInputs, how: SamplingInputs, logits: jax.Array, guessed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens after the last one and after each draft [B, 1 + D], and how many of them stand [B].

    A draft stands if it is the very token sampled in its place, and each one before it stands; then
    the token sampled after it is one more. So the tokens are those of decoding one by one: a token
    that is drawn depends on the logits, the seed and its index only (`sample`). For a draft that is
    no distribution but one token this also is speculative sampling (Leviathan et al. 2023): it
    stands with its probability, and otherwise one is drawn from the rest.
    """
    samples, drafts = inputs.layout[2], inputs.layout[3]
    shape = len(samples), 1 + guessed.shape[1]
    number = jnp.arange(shape[1], dtype=jnp.int32)
    of_row = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, shape[1], axis=0, total_repeat_length=shape[0] * shape[1]),
        how,
    )
    step = (how.step[:, None] + number).reshape(-1)
    sampled = sample(logits, dataclasses.replace(of_row, step=step)).reshape(shape)
    stands = (sampled[:, :-1] == guessed) & (number[:-1] < drafts[:, None])
    count = 1 + jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
    return sampled, jnp.where(samples > 0, count, 0)


@dataclass(frozen=True)
class SampledSteps:
    """The program of an engine's steps, as `ModelRunner` takes it.

    With `prompt_logprobs` it is another one, whose prefills describe the tokens of prompts too.
    """

    ranks: int  # R
    rows: int  # S
    cache: CacheConfig
    finds_drafts: bool = False
    prompt_logprobs: int | None = None  # of the most probable tokens, how many are told

    @staticmethod
    def of(runner: ModelRunner, rows: int, finds_drafts: bool = False) -> SampledSteps:
        """That of a runner whose steps have so many sequences at most, and find drafts for them."""
        return SampledSteps(num_ranks(runner.mesh), rows, runner.cache, finds_drafts)

    @property
    def state_shapes(self) -> RowState:
        """The shapes of a rank's rows."""
        return RowState.shapes(self.rows, self.cache, self.finds_drafts)

    def shapes(self, bucket: Bucket) -> tuple[RowState, StepInputs]:
        """Shapes of the inputs beside weights and buffers, leaves [R, ...]."""
        inputs = StepInputs.shapes(bucket, self.cache, self.prompt_logprobs is not None)
        return stacked(self.ranks, (self.state_shapes, inputs))

    def trace(
        self, bucket: Bucket, forward: Forward, state: RowState, inputs: StepInputs
    ) -> tuple[SampledStep, Any]:
        """The step of a rank."""
        return run_step(bucket, forward, state, inputs, self.prompt_logprobs)

    def placed(self, bucket: Bucket, on_ranks: Any, on_all: Any) -> SampledStep:
        """Where the outputs are: what the host reads is whole in each of several processes."""
        state = jax.tree.map(lambda _: on_ranks, self.state_shapes)
        described = None if self.prompt_logprobs is None else on_all
        counts = on_all if bucket.drafts else None
        drafts = on_ranks if bucket.drafts else None
        return SampledStep(on_ranks, on_ranks, on_all, state, counts, drafts, described)

    def from_batch(self, bucket: Bucket, batch: ForwardBatch) -> tuple[RowState, StepInputs]:
        """Inputs that make a batch [R, ...] of numpy; its sequences are the first rows, greedy."""
        sequences = batch.sequence_capacity
        state, inputs = zeros(self.shapes(bucket))
        state.numbers[:, :sequences, CONTEXT] = batch.context_lens
        state.pages[:, :sequences] = batch.page_table
        inputs.tokens[:] = batch.token_ids
        live = batch.query_lens > 0
        inputs.layout[:, 0] = batch.query_lens
        inputs.layout[:, 1] = np.where(live, np.arange(sequences), self.rows)
        inputs.layout[:, 2] = live
        if bucket.drafts and bucket.decode:
            inputs.layout[:, 3] = np.maximum(batch.query_lens - 1, 0)
        if inputs.targets is not None:
            inputs.targets[:] = -1
        return state, inputs


def with_sampling(runner: ModelRunner, rows: int, finds_drafts: bool = False) -> ModelRunner:
    """A runner of the same model whose steps sample; the given one, if its steps do."""
    program = SampledSteps.of(runner, rows, finds_drafts)
    return runner if runner.program == program else runner.with_program(program)


def describing_prompts(runner: ModelRunner, program: SampledSteps, most: int) -> ModelRunner:
    """A runner whose steps sample, and describe tokens of prompts with `most` of the best ones."""
    most = min(most, runner.config.vocab_size)
    return runner.with_program(dataclasses.replace(program, prompt_logprobs=most))


def zeros(shapes: Any) -> Any:
    """Arrays of numpy of these shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def stacked(ranks: int, tree: Any) -> Any:
    """Shapes of one rank's leaves [...] -> those of all ranks' [R, ...]."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ranks, *leaf.shape), leaf.dtype), tree)

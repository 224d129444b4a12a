"""What the device knows of the rows of the engine, and the step that reads it and goes on from it.

A row has a number of tokens in the cache, its last token, its pages, and how to sample. Each step
makes its batch of these, samples, and leaves them as the next one needs them. So the host, which
plans that step while this one runs, sends only what the device cannot know: which rows take part,
tokens of prompts, new pages, and new requests.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

    @staticmethod
    def shapes(rows: int, cache: CacheConfig) -> RowState:
        """The shapes of a rank's state."""
        numbers, pages = (rows, SAMPLING.stop), (rows, cache.pages_per_sequence)
        return RowState(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in (numbers, pages)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowChanges:
    """New contents of some rows. U: how many; those that are no rows (S) say nothing."""

    rows: Any  # [U] int32
    numbers: Any  # [U, 9] int32; a token below 0 leaves the one that is there
    pages: Any  # [U, P] int32

    @staticmethod
    def shapes(count: int, cache: CacheConfig) -> RowChanges:
        """The shapes of a rank's changes."""
        shapes = (count,), (count, SAMPLING.stop), (count, cache.pages_per_sequence)
        return RowChanges(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What the host tells of a step. T: token slots, B: sequences, M: pages that one may get."""

    tokens: Any  # [T] int32, sequence after sequence, or `LAST_TOKEN`
    layout: Any  # [3, B] int32: tokens of each sequence, its row (S: none), whether it samples
    new_pages: Any  # [B, M, 2] int32: place in the page table, and the page; 0: none
    # [T] int32, the tokens after those of `tokens`, whose log-probabilities are wanted; -1: not.
    targets: Any = None

    @staticmethod
    def shapes(bucket: Bucket, cache: CacheConfig, targets: bool = False) -> StepInputs:
        """The shapes of a rank's inputs."""
        most = -(-(1 + bucket.drafts) // cache.page_size)
        shapes = [(bucket.tokens,), (3, bucket.sequences), (bucket.sequences, most, 2)]
        shapes += [(bucket.tokens,)] * targets
        return StepInputs(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledStep:
    """What a step gives beside the attention buffers."""

    logits: Any  # float32 [B, V], or with drafts [T, V]
    tokens: Any  # [S] int32, of each sequence the last one sampled that stands; 0 without logits
    readable: Any  # [B] int32, or with drafts [T]: what was sampled, with `NOT_FINITE`
    state: RowState
    described: Any = None  # [T, 2 + 2N] int32, of `targets` (`sampling.options.describe`)


def sampled_rows(bucket: Bucket) -> int:
    """Rows of the logits: one a sequence, or with drafts one a token."""
    return bucket.tokens if bucket.drafts else bucket.sequences


def change_rows(state: RowState, changes: RowChanges) -> RowState:
    """The state with the contents of some rows replaced."""
    known = jnp.take(state.numbers[:, TOKEN], changes.rows, mode="clip")
    token = jnp.where(changes.numbers[:, TOKEN] < 0, known, changes.numbers[:, TOKEN])
    numbers = changes.numbers.at[:, TOKEN].set(token)
    return RowState(
        state.numbers.at[changes.rows].set(numbers, mode="drop"),
        state.pages.at[changes.rows].set(changes.pages, mode="drop"),
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
    if prompt_logprobs is None:
        logits, buffers = forward(batch)
        return _sampled(bucket, state, inputs, logits, batch.token_ids), buffers
    each = EachToken(inputs.targets, functools.partial(describe, most=prompt_logprobs))
    (logits, described), buffers = forward(batch, each)
    step = _sampled(bucket, state, inputs, logits, batch.token_ids)
    return dataclasses.replace(step, described=described), buffers


def needed_again(bucket: Bucket, inputs: Any) -> Any:
    """What `sample_again` takes of a step's inputs: without drafts the tokens do not matter.

    So steps with as many sequences share a program, whatever token slots they have.
    """
    return inputs if bucket.drafts else dataclasses.replace(inputs, tokens=None, targets=None)


def sample_again(
    bucket: Bucket, state: RowState, inputs: StepInputs, logits: jax.Array
) -> SampledStep:
    """What `run_step` gives for other logits, from the state before it and `needed_again`."""
    state = _with_pages(state, inputs)
    token_ids = _batch_of(bucket, state, inputs).token_ids if bucket.drafts else None
    return _sampled(bucket, state, inputs, logits, token_ids)


def _with_pages(state: RowState, inputs: StepInputs) -> RowState:
    place, page = inputs.new_pages[..., 0], inputs.new_pages[..., 1]
    rows = jnp.where(page > 0, inputs.layout[1][:, None], len(state.pages))
    return RowState(state.numbers, state.pages.at[rows, place].set(page, mode="drop"))


def _batch_of(bucket: Bucket, state: RowState, inputs: StepInputs) -> ForwardBatch:
    lengths, rows, _ = inputs.layout
    numbers = jnp.take(state.numbers, rows, axis=0, mode="fill", fill_value=0)
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    slot, total = jnp.arange(bucket.tokens, dtype=jnp.int32), ends[-1]
    live = slot < total
    one_each = bucket.decode and not bucket.drafts
    sequence = jnp.where(live, slot if one_each else _sequence_of_slots(bucket, lengths), 0)
    tokens = jnp.where(inputs.tokens == LAST_TOKEN, numbers[sequence, TOKEN], inputs.tokens)
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


def _sampled(
    bucket: Bucket,
    state: RowState,
    inputs: StepInputs,
    logits: jax.Array,
    token_ids: jax.Array | None,
) -> SampledStep:
    lengths, rows, samples = inputs.layout
    numbers = jnp.take(state.numbers, rows, axis=0, mode="fill", fill_value=0)
    how = SamplingInputs.unpack(numbers[:, SAMPLING])
    if token_ids is None or not bucket.drafts:
        sampled = sample(logits, how)
        tokens, count, computed = jnp.maximum(sampled, 0), samples, lengths
    else:
        sampled, tokens, count = _verified(bucket, lengths, how, logits, token_ids)
        computed = count
    last = jnp.where(samples > 0, tokens, numbers[:, TOKEN])
    numbers = numbers.at[:, CONTEXT].add(computed).at[:, TOKEN].set(last).at[:, COUNT].add(count)
    state = RowState(state.numbers.at[rows].set(numbers, mode="drop"), state.pages)
    padding = len(state.numbers) - len(tokens)
    return SampledStep(logits, jnp.pad(tokens, (0, padding)), sampled, state)


def _verified(
    bucket: Bucket,
    lengths: jax.Array,
    how: SamplingInputs,
    logits: jax.Array,
    token_ids: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens after the last one and after each draft [T], the last that stands [B], how many [B].

    The same as `ScheduledSequence.accept`.
    """
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    slot = jnp.arange(bucket.tokens, dtype=jnp.int32)
    sequence = _sequence_of_slots(bucket, lengths)
    of_token = jax.tree.map(lambda leaf: leaf[sequence], how)
    step = of_token.step + slot - starts[sequence]
    sampled = sample(logits, dataclasses.replace(of_token, step=step))
    stands = (sampled == jnp.roll(token_ids, -1)) & (slot < ends[sequence] - 1)
    # The first slot whose draft does not stand, at the latest the last of the sequence.
    end = jax.ops.segment_min(
        jnp.where(stands | (slot >= ends[-1]), bucket.tokens, slot), sequence, bucket.sequences
    )
    live = lengths > 0
    end = jnp.where(live, end, 0)
    count = jnp.where(live, end - starts + 1, 0)
    return sampled, jnp.maximum(sampled[end], 0), count


@dataclass(frozen=True)
class SampledSteps:
    """The program of an engine's steps, as `ModelRunner` takes it.

    With `prompt_logprobs` it is another one, whose prefills describe the tokens of prompts too.
    """

    ranks: int  # R
    rows: int  # S
    cache: CacheConfig
    prompt_logprobs: int | None = None  # of the most probable tokens, how many are told

    @staticmethod
    def of(runner: ModelRunner, rows: int) -> SampledSteps:
        """That of a runner whose steps have so many sequences at most."""
        return SampledSteps(num_ranks(runner.mesh), rows, runner.cache)

    def shapes(self, bucket: Bucket) -> tuple[RowState, StepInputs]:
        """Shapes of the inputs beside weights and buffers, leaves [R, ...]."""
        inputs = StepInputs.shapes(bucket, self.cache, self.prompt_logprobs is not None)
        return stacked(self.ranks, (RowState.shapes(self.rows, self.cache), inputs))

    def trace(
        self, bucket: Bucket, forward: Forward, state: RowState, inputs: StepInputs
    ) -> tuple[SampledStep, Any]:
        """The step of a rank."""
        return run_step(bucket, forward, state, inputs, self.prompt_logprobs)

    def placed(self, on_ranks: Any, on_all: Any) -> SampledStep:
        """Where the outputs are: what the host reads is whole in each of several processes."""
        described = None if self.prompt_logprobs is None else on_all
        return SampledStep(on_ranks, on_ranks, on_all, RowState(on_ranks, on_ranks), described)

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
        if inputs.targets is not None:
            inputs.targets[:] = -1
        return state, inputs


def with_sampling(runner: ModelRunner, rows: int) -> ModelRunner:
    """A runner of the same model whose steps sample; the given one, if its steps do."""
    program = SampledSteps.of(runner, rows)
    return runner if runner.program == program else runner.with_program(program)


def describing_prompts(runner: ModelRunner, rows: int, most: int) -> ModelRunner:
    """A runner whose steps sample, and describe tokens of prompts with `most` of the best ones."""
    most = min(most, runner.config.vocab_size)
    program = SampledSteps.of(runner, rows)
    return runner.with_program(dataclasses.replace(program, prompt_logprobs=most))


def zeros(shapes: Any) -> Any:
    """Arrays of numpy of these shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def stacked(ranks: int, tree: Any) -> Any:
    """Shapes of one rank's leaves [...] -> those of all ranks' [R, ...]."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ranks, *leaf.shape), leaf.dtype), tree)

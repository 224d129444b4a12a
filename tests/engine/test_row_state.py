"""What the device knows of the rows: the batch of a step, its tokens, and the state after it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax import Bucket, CacheConfig, ForwardBatch, SamplingParams
from tbo_jax.engine.row_state import (
    CONTEXT,
    COUNT,
    LAST_TOKEN,
    SAMPLING,
    TOKEN,
    RowChanges,
    RowState,
    SampledSteps,
    StepInputs,
    change_rows,
    needed_again,
    run_step,
    sample_again,
)
from tbo_jax.engine.scheduling.plan import accepted
from tbo_jax.sampling.draw import NOT_FINITE, SamplingInputs, sample

ROWS, VOCABULARY = 5, 11
CACHE = CacheConfig(num_pages=40, page_size=2, pages_per_sequence=6, max_tokens=12)
DECODE, PREFILL, VERIFY = Bucket(4, 4, True), Bucket(12, 5), Bucket(12, 4, True, 2)


def random_state(rng: np.random.Generator) -> RowState:
    params = [SamplingParams(temperature=float(rng.integers(0, 2)), top_p=0.9) for _ in range(ROWS)]
    numbers = np.zeros((ROWS, SAMPLING.stop), np.int32)
    numbers[:, CONTEXT] = rng.integers(1, 8, ROWS)
    numbers[:, TOKEN] = rng.integers(0, VOCABULARY, ROWS)
    seeds, counts = rng.integers(0, 99, ROWS).tolist(), rng.integers(0, 9, ROWS).tolist()
    numbers[:, SAMPLING] = SamplingInputs.from_rows(params, seeds, counts, ROWS).packed()
    return RowState(numbers, rng.integers(1, 40, (ROWS, 6)).astype(np.int32))


def inputs_of(
    bucket: Bucket,
    sequences: list[tuple[int, list[int], bool]],
    new_pages: dict[int, list[tuple[int, int]]] | None = None,
) -> StepInputs:
    """Of (row, tokens, whether it samples), and the pages that some of the sequences get."""
    shapes = StepInputs.shapes(bucket, CACHE)
    inputs = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.int32), shapes)
    inputs.layout[1] = ROWS
    tokens = [token for _, of, _ in sequences for token in of]
    inputs.tokens[: len(tokens)] = tokens
    for place, (row, of, samples) in enumerate(sequences):
        inputs.layout[:, place] = len(of), row, samples
    for place, pages in (new_pages or {}).items():
        inputs.new_pages[place, : len(pages)] = pages
    return inputs


@functools.cache
def compiled(bucket: Bucket):
    def both(state, inputs, logits):
        batches = []

        def forward(batch: ForwardBatch):
            batches.append(batch)
            return logits, ()

        step, _ = run_step(bucket, forward, state, inputs)
        return *batches, step, sample_again(bucket, state, needed_again(bucket, inputs), logits)

    return jax.jit(both)


def run(bucket: Bucket, state: RowState, inputs: StepInputs, logits: np.ndarray):
    """The batch that the model gets, and what the step gives."""
    found = compiled(bucket)(state, inputs, logits)
    batch, step, again = jax.tree.map(np.asarray, found)
    jax.tree.map(np.testing.assert_array_equal, again, step)
    return batch, step


def packed(bucket: Bucket, state: RowState, sequences, pages: np.ndarray) -> ForwardBatch:
    """The batch that the host would make of it."""
    batch = ForwardBatch.pack(
        [
            [state.numbers[row, TOKEN] if t == LAST_TOKEN else t for t in of]
            for row, of, _ in sequences
        ],
        [state.numbers[row, CONTEXT] for row, _, _ in sequences],
        [pages[row] for row, _, _ in sequences],
        token_capacity=bucket.tokens, sequence_capacity=bucket.sequences, pages_per_sequence=6,
    )  # fmt: skip
    return jax.tree.map(np.asarray, batch)


@pytest.mark.parametrize("seed", range(5))
def test_a_step_with_prompts(seed: int) -> None:
    """Two decodes, a prompt that ends, one that does not; row 4 takes no part."""
    rng = np.random.default_rng(seed)
    state = random_state(rng)
    rows = rng.permutation(ROWS)[:4].tolist()
    texts = [[LAST_TOKEN], [LAST_TOKEN], [3, 1, 4], [1, 5, 9, 2, 6]]
    samples = [True, True, True, False]
    sequences = list(zip(rows, texts, samples, strict=True))
    inputs = inputs_of(PREFILL, sequences, {1: [(3, 39)]})
    logits = rng.normal(0, 2, (5, VOCABULARY)).astype(np.float32)
    logits[1, 4] = np.nan
    batch, step = run(PREFILL, state, inputs, logits)
    pages = state.pages.copy()
    pages[rows[1], 3] = 39
    jax.tree.map(np.testing.assert_array_equal, batch, packed(PREFILL, state, sequences, pages))
    assert step.readable[1] == NOT_FINITE
    after = state.numbers.copy()
    after[rows, CONTEXT] += [1, 1, 3, 5]
    after[rows[:3], TOKEN] = np.maximum(step.readable[:3], 0)
    after[rows[:3], COUNT] += 1
    np.testing.assert_array_equal(step.state.numbers, after)
    np.testing.assert_array_equal(step.state.pages, pages)
    np.testing.assert_array_equal(step.tokens[:4], np.maximum(step.readable[:4], 0))
    # What is drawn is a function of the row's own numbers.
    alone = SamplingInputs.unpack(jnp.asarray(state.numbers[rows, SAMPLING]))
    np.testing.assert_array_equal(step.readable[:4], sample(jnp.asarray(logits[:4]), alone))


@pytest.mark.parametrize("count", range(5))
def test_a_step_of_decodes(count: int) -> None:
    rng = np.random.default_rng(count)
    state = random_state(rng)
    sequences = [(row, [LAST_TOKEN], True) for row in sorted(rng.permutation(ROWS)[:count])]
    logits = rng.normal(0, 2, (4, VOCABULARY)).astype(np.float32)
    batch, step = run(DECODE, state, inputs_of(DECODE, sequences), logits)
    expected = packed(DECODE, state, sequences, state.pages)
    jax.tree.map(np.testing.assert_array_equal, batch, expected)
    others = [row for row in range(ROWS) if row not in [s[0] for s in sequences]]
    np.testing.assert_array_equal(step.state.numbers[others], state.numbers[others])


@pytest.mark.parametrize("seed", range(20))
def test_drafts_stand_as_on_the_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = random_state(rng)
    state.numbers[:, SAMPLING.start] = 0  # greedy
    rows = rng.permutation(ROWS)[: int(rng.integers(1, 5))].tolist()
    drafts = [rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist() for _ in rows]
    sequences = [(row, [LAST_TOKEN, *of], True) for row, of in zip(rows, drafts, strict=True)]
    logits = rng.normal(0, 1, (12, VOCABULARY)).astype(np.float32)
    slot, expected = 0, []
    for of in drafts:
        for place, draft in enumerate(of):
            if rng.random() < 0.7:
                logits[slot + place, draft] = 9
        best = logits[slot : slot + len(of) + 1].argmax(axis=1).tolist()
        expected.append(accepted(of, best))
        slot += len(of) + 1
    pages = {0: [(2, 7), (3, 8)]}
    batch, step = run(VERIFY, state, inputs_of(VERIFY, sequences, pages), logits)
    table = state.pages.copy()
    table[rows[0], 2:4] = 7, 8
    jax.tree.map(np.testing.assert_array_equal, batch, packed(VERIFY, state, sequences, table))
    after = state.numbers.copy()
    for row, tokens in zip(rows, expected, strict=True):
        after[row, [CONTEXT, COUNT]] += len(tokens)
        after[row, TOKEN] = tokens[-1]
    np.testing.assert_array_equal(step.state.numbers, after)
    assert step.tokens[: len(rows)].tolist() == [tokens[-1] for tokens in expected]


def test_rows_are_replaced_but_for_a_token_that_is_not_known() -> None:
    rng = np.random.default_rng(0)
    state, other = random_state(rng), random_state(rng)
    rows = np.array([3, 1, ROWS, ROWS], np.int32)
    changes = RowChanges(rows, other.numbers[:4].copy(), other.pages[:4])
    changes.numbers[1, TOKEN] = -4
    found = change_rows(*jax.tree.map(jnp.asarray, (state, changes)))
    numbers, pages = state.numbers.copy(), state.pages.copy()
    numbers[[3, 1]], pages[[3, 1]] = other.numbers[:2], other.pages[:2]
    numbers[1, TOKEN] = state.numbers[1, TOKEN]
    np.testing.assert_array_equal(found.numbers, numbers)
    np.testing.assert_array_equal(found.pages, pages)


@pytest.mark.parametrize("bucket", [DECODE, PREFILL, VERIFY], ids=str)
def test_inputs_of_a_batch_give_that_batch(bucket: Bucket) -> None:
    texts = [[4], [7]] if bucket.decode else [[4], [7, 8, 9]]
    batch = ForwardBatch.pack(
        texts, [3, 2], [[5, 6], [7, 8, 9]],
        token_capacity=bucket.tokens, sequence_capacity=bucket.sequences, pages_per_sequence=6,
    )  # fmt: skip
    ranks = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), batch)
    program = SampledSteps(2, ROWS, CACHE)
    given = program.from_batch(bucket, ranks)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), given)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), program.shapes(bucket))
    logits = np.zeros((bucket.tokens if bucket.drafts else bucket.sequences, VOCABULARY))
    for rank in range(2):
        one = jax.tree.map(lambda leaf, rank=rank: leaf[rank], given)
        found, _ = run(bucket, *one, logits.astype(np.float32))
        jax.tree.map(np.testing.assert_array_equal, found, batch)

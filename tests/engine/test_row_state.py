"""What the device knows of the rows: the batch of a step, its tokens, and the state after it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax import Bucket, CacheConfig, ForwardBatch, SamplingParams
from tbo_jax.engine.prompt_lookup import TO_FIND, prompt_lookup
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
from tbo_jax.sampling.draw import NOT_FINITE, SamplingInputs, sample

ROWS, VOCABULARY = 5, 11
CACHE = CacheConfig(num_pages=40, page_size=2, pages_per_sequence=6, max_tokens=12)
DECODE, PREFILL, VERIFY = Bucket(4, 4, True), Bucket(12, 5), Bucket(12, 4, True, 2)
MIXED = Bucket(12, 4, drafts=2)


def random_state(rng: np.random.Generator, with_history: bool = False) -> RowState:
    params = [SamplingParams(temperature=float(rng.integers(0, 2)), top_p=0.9) for _ in range(ROWS)]
    numbers = np.zeros((ROWS, SAMPLING.stop), np.int32)
    numbers[:, CONTEXT] = rng.integers(1, 8, ROWS)
    numbers[:, TOKEN] = rng.integers(0, VOCABULARY, ROWS)
    seeds, counts = rng.integers(0, 99, ROWS).tolist(), rng.integers(0, 9, ROWS).tolist()
    numbers[:, SAMPLING] = SamplingInputs.from_rows(params, seeds, counts, ROWS).packed()
    pages = rng.integers(1, 40, (ROWS, 6)).astype(np.int32)
    history = None
    if with_history:
        history = rng.integers(0, 3, (ROWS, 12)).astype(np.int32)
        numbers[:, TOKEN] = history[np.arange(ROWS), numbers[:, CONTEXT]]
    return RowState(numbers, pages, history)


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
        inputs.layout[:3, place] = len(of), row, samples
        if bucket.drafts:
            drafts = of[1:] if of[0] == LAST_TOKEN else []
            inputs.layout[3, place] = len(drafts)
    for place, pages in (new_pages or {}).items():
        inputs.new_pages[place, : len(pages)] = pages
    return inputs


@functools.cache
def compiled(bucket: Bucket):
    def both(state, inputs, logits):
        batches = []

        def forward(batch: ForwardBatch, slots):
            batches.append(batch)
            # Those given are of token slots then.
            return logits if slots is None else logits[slots], ()

        step, _ = run_step(bucket, forward, state, inputs)
        given = state, needed_again(inputs), step.logits, step.drafts
        return *batches, step, sample_again(bucket, *given)

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


def accepted(drafts: list[int], sampled: list[int]) -> list[int]:
    """The new tokens, of those sampled after the last known token and after each draft."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return sampled[: count + 1]


@pytest.mark.parametrize("bucket", [VERIFY, MIXED], ids=str)
@pytest.mark.parametrize("found", [False, True], ids=["given", "found"])
@pytest.mark.parametrize("seed", range(10))
def test_drafts_stand_that_are_sampled(bucket: Bucket, found: bool, seed: int) -> None:
    """Given by the host, or found in the text; beside a prompt too."""
    rng = np.random.default_rng(seed)
    state = random_state(rng, found)
    state.numbers[:, SAMPLING.start] = 0  # greedy
    rows = rng.permutation(ROWS)[: int(rng.integers(1, 4))].tolist()
    counts = [int(rng.integers(0, 3)) for _ in rows]
    if found:
        guesses = prompt_lookup(state.history, state.numbers[:, CONTEXT] + 1, 2)[rows]
        drafts = [of[:count].tolist() for of, count in zip(guesses, counts, strict=True)]
    else:
        drafts = [rng.integers(0, VOCABULARY, count).tolist() for count in counts]
    told = [[TO_FIND] * len(of) if found else of for of in drafts]
    sequences = [(row, [LAST_TOKEN, *of], True) for row, of in zip(rows, drafts, strict=True)]
    inputs = [(row, [LAST_TOKEN, *of], True) for row, of in zip(rows, told, strict=True)]
    if bucket is MIXED:
        prompt = [next(row for row in range(ROWS) if row not in rows), [3, 1, 4], True]
        sequences.append(prompt), inputs.append(prompt)
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
    batch, step = run(bucket, state, inputs_of(bucket, inputs, pages), logits)
    table = state.pages.copy()
    table[rows[0], 2:4] = 7, 8
    jax.tree.map(np.testing.assert_array_equal, batch, packed(bucket, state, sequences, table))
    after, texts = state.numbers.copy(), None if state.history is None else state.history.copy()
    for row, tokens in zip(rows, expected, strict=True):
        after[row, [CONTEXT, COUNT]] += len(tokens)
        after[row, TOKEN] = tokens[-1]
        if texts is not None:
            here = state.numbers[row, CONTEXT] + 1
            texts[row, here : here + len(tokens)] = tokens[: texts.shape[1] - here]
    if bucket is MIXED:
        row, of, _ = prompt
        expected.append([int(logits[slot + 2].argmax())])
        after[row, CONTEXT] += 3
        after[row, COUNT] += 1
        after[row, TOKEN] = expected[-1][0]
        if texts is not None and after[row, CONTEXT] < texts.shape[1]:
            texts[row, after[row, CONTEXT]] = after[row, TOKEN]
    np.testing.assert_array_equal(step.state.numbers, after)
    jax.tree.map(np.testing.assert_array_equal, step.state.history, texts)
    assert step.counts[: len(expected)].tolist() == list(map(len, expected))
    assert not step.counts[len(expected) :].any()
    assert step.tokens[: len(expected)].tolist() == [tokens[-1] for tokens in expected]
    read = step.readable.reshape(4, 3)
    assert [of[: len(t)].tolist() for of, t in zip(read, expected, strict=False)] == expected


def test_rows_are_replaced_but_for_what_the_device_alone_knows() -> None:
    rng = np.random.default_rng(0)
    state, other = random_state(rng, True), random_state(rng, True)
    rows = np.array([3, 1, ROWS, ROWS], np.int32)
    changes = RowChanges(rows, other.numbers[:4].copy(), other.pages[:4], other.history[:4])
    changes.numbers[1, CONTEXT] = -1
    found = change_rows(*jax.tree.map(jnp.asarray, (state, changes)))
    expected = jax.tree.map(np.copy, state)
    expected.pages[[3, 1]] = other.pages[:2]
    expected.numbers[3], expected.history[3] = other.numbers[0], other.history[0]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("bucket", [DECODE, PREFILL, VERIFY, MIXED], ids=str)
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
    logits = np.zeros((max(bucket.tokens, bucket.sequences), VOCABULARY))
    if not bucket.drafts:
        logits = logits[: bucket.sequences]
    for rank in range(2):
        one = jax.tree.map(lambda leaf, rank=rank: leaf[rank], given)
        found, _ = run(bucket, *one, logits.astype(np.float32))
        jax.tree.map(np.testing.assert_array_equal, found, batch)

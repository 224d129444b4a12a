"""Times the programs of a bucket on the device, on a full batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.overlap.batch import ForwardBatch, stack_batches
from tbo_jax.overlap.config import OFF, Strategy
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig

# bucket, strategy, one step of that program until its results are there -> seconds
Timer = Callable[[Bucket, Strategy, Callable[[], None]], float]
ROUNDS = 7  # timed runs of each program, after one that is not
# Tokens of prompts and contexts that are timed: short, median and long ones of a chat. Half of what
# the cache can hold, thousands of pages in a long-context model, is what few requests have.
TYPICAL = (256, 1024, 4096)


@dataclass(frozen=True)
class Trial:
    """What timing the programs of a bucket gave."""

    seconds: Mapping[Strategy, float]  # of a step
    # Of those that failed. Their programs have no seconds.
    errors: Mapping[Strategy, jax.errors.JaxRuntimeError] = field(default_factory=dict)
    # Rounds of `ROUNDS` in which a program was faster than the plain one.
    wins: Mapping[Strategy, int] = field(default_factory=dict)


def wall_clock(bucket: Bucket, strategy: Strategy, run: Callable[[], None]) -> float:
    """Seconds that `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_programs(
    runner: ModelRunner,
    bucket: Bucket,
    strategies: Sequence[Strategy],
    buffers: AttentionBuffers,
    timer: Timer = wall_clock,
) -> tuple[Trial, AttentionBuffers]:
    """Time programs of a bucket, in turn; medians.

    Args:
        runner: has compiled them.
        bucket: of the steps.
        strategies: the plain one first.
        buffers: donated to the steps; the pages then hold what these wrote.
        timer: takes the time of one step.

    Returns:
        The trial, and the buffers. A program that fails, for want of memory say, has its error in
        the trial and no time; the others are timed without it, and the buffers are new ones.

    Raises:
        jax.errors.JaxRuntimeError: the plain program fails: nothing could run. Or there are several
            processes, and any program fails.
    """
    vocabulary, ranks = runner.config.vocab_size, num_ranks(runner.mesh)
    batch = full_batch(bucket, runner.cache, vocabulary, ranks)  # on the host, as the engine's are

    def run(strategy: Strategy) -> None:
        nonlocal buffers
        logits, buffers = runner.step(bucket, buffers, batch, strategy)
        jax.block_until_ready((logits, buffers))

    errors: dict[Strategy, jax.errors.JaxRuntimeError] = {}
    times: dict[Strategy, list[float]] = {strategy: [] for strategy in strategies}

    def attempt(strategy: Strategy, work: Callable[[], None]) -> None:
        nonlocal buffers
        if strategy in errors:
            return
        try:
            work()
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() > 1 or strategy == OFF:
                # The others may be in a collective of the step, and wait for this process. Its end
                # is what they are told.
                raise
            # What the failed step returned, or was given, may be unusable without being deleted;
            # and there may be no memory for another set beside it.
            for leaf in jax.tree.leaves(buffers):
                if not leaf.is_deleted():
                    leaf.delete()
            errors[strategy] = error
            buffers = runner.allocate()

    def measure(strategy: Strategy) -> None:
        times[strategy].append(timer(bucket, strategy, partial(run, strategy)))

    for strategy in strategies:
        attempt(strategy, partial(run, strategy))
    for turn in range(ROUNDS):
        # Each goes first as often as the others, so that a drift of the clock rate hits all.
        for strategy in strategies if turn % 2 == 0 else reversed(strategies):
            attempt(strategy, partial(measure, strategy))
    timed = [strategy for strategy in strategies if strategy not in errors]
    medians = {strategy: statistics.median(times[strategy]) for strategy in timed}
    wins = {
        strategy: sum(b < a for a, b in zip(times[strategies[0]], times[strategy], strict=True))
        for strategy in timed
    }
    return Trial(medians, errors, wins), buffers


def full_batch(bucket: Bucket, cache: CacheConfig, vocab_size: int, num_ranks: int) -> ForwardBatch:
    """A batch that fills the bucket on every rank, the same in every process.

    Random token ids. The contexts of the rows are `TYPICAL` in turn, as far as a page table holds
    them, and so are the prompts where several tokens of a row are computed. Rows share pages where
    there are too few: what is read matters to no time.

    Returns:
        Leaves [num_ranks, ...] (numpy).
    """
    rng = np.random.default_rng(0)
    room = cache.pages_per_sequence * cache.page_size
    lengths = _lengths(bucket, room)
    contexts = [
        min(TYPICAL[row % len(TYPICAL)], room - length) for row, length in enumerate(lengths)
    ]
    pages = []
    first = 0
    for length, context in zip(lengths, contexts, strict=True):
        needed = -(-(context + length) // cache.page_size)
        # Page 0 is kept for padding.
        pages.append([1 + page % (cache.num_pages - 1) for page in range(first, first + needed)])
        first += needed
    return stack_batches(
        [
            ForwardBatch.pack(
                [rng.integers(0, vocab_size, length).tolist() for length in lengths],
                contexts,
                pages,
                token_capacity=bucket.tokens,
                sequence_capacity=bucket.sequences,
                pages_per_sequence=cache.pages_per_sequence,
                page_size=cache.page_size,
            )
            for _ in range(num_ranks)
        ]
    )


def _lengths(bucket: Bucket, room: int) -> list[int]:
    """How many tokens of each row a full bucket computes, none more than `room`."""
    rows = min(bucket.sequences, bucket.tokens)
    even = [bucket.tokens // rows + (row < bucket.tokens % rows) for row in range(rows)]
    if bucket.decode:
        return [min(length, room) for length in even]
    lengths: list[int] = []
    left = bucket.tokens
    while left and len(lengths) < rows:
        lengths.append(min(TYPICAL[len(lengths) % len(TYPICAL)], room, left))
        left -= lengths[-1]
    for row, length in enumerate(lengths):  # all rows are taken: longer ones
        more = min(left, room - length)
        lengths[row] += more
        left -= more
    return lengths

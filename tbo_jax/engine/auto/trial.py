"""Times the programs of a bucket on the device, on a full batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.overlap.batch import ForwardBatch, stack_batches
from tbo_jax.parallel.sharding import RANKS, num_ranks
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig

# bucket, number of micro-batches, one step of that program until its results are there -> seconds
Timer = Callable[[Bucket, int, Callable[[], None]], float]
ROUNDS = 7  # timed runs of each program, after one that is not


@dataclass(frozen=True)
class Trial:
    """What timing the programs of a bucket gave."""

    seconds: Mapping[int, float]  # of a step, by number of micro-batches; empty after an error
    error: jax.errors.JaxRuntimeError | None = None


def wall_clock(bucket: Bucket, micro_batches: int, run: Callable[[], None]) -> float:
    """Seconds that `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_programs(
    runner: ModelRunner, bucket: Bucket, buffers: AttentionBuffers, timer: Timer = wall_clock
) -> tuple[Trial, AttentionBuffers]:
    """Time the whole and the split program of a bucket, in turn; medians.

    Args:
        runner: has compiled both.
        bucket: with two candidates.
        buffers: donated to the steps; the pages then hold what these wrote.
        timer: takes the time of one step.

    Returns:
        The trial, and the buffers. When the split program fails, for want of memory say, the trial
        has its error and the buffers are new ones.

    Raises:
        jax.errors.JaxRuntimeError: the whole program fails at once: nothing could run.
    """
    shared = NamedSharding(runner.mesh, PartitionSpec(RANKS))
    vocabulary, ranks = runner.config.vocab_size, num_ranks(runner.mesh)
    batch = jax.device_put(full_batch(bucket, runner.cache, vocabulary, ranks), shared)

    def run(count: int) -> None:
        nonlocal buffers
        logits, buffers = runner.step(bucket, buffers, batch, count)
        jax.block_until_ready((logits, buffers))

    whole, split = runner.overlap.candidates(bucket.tokens)
    run(whole)
    times: dict[int, list[float]] = {whole: [], split: []}
    try:
        run(split)
        for turn in range(ROUNDS):
            # Each goes first as often as the other, so that a drift of the clock rate hits both.
            for count in (whole, split) if turn % 2 == 0 else (split, whole):
                times[count].append(timer(bucket, count, partial(run, count)))
    except jax.errors.JaxRuntimeError as error:
        # What the failed step returned, or was given, may be unusable without being deleted; and
        # there may be no memory for another set beside it.
        for leaf in jax.tree.leaves(buffers):
            if not leaf.is_deleted():
                leaf.delete()
        return Trial({}, error), runner.allocate()
    return Trial({count: statistics.median(of) for count, of in times.items()}), buffers


def full_batch(bucket: Bucket, cache: CacheConfig, vocab_size: int, num_ranks: int) -> ForwardBatch:
    """A batch that fills the bucket on every rank, the same in every process.

    Random token ids, spread evenly over the rows; the context of each row is half of what its page
    table holds. Rows share pages where there are too few: what is read matters to no time.

    Returns:
        Leaves [num_ranks, ...] (numpy).
    """
    rng = np.random.default_rng(0)
    rows = min(bucket.sequences, bucket.tokens)
    room = cache.pages_per_sequence * cache.page_size
    shares = [bucket.tokens // rows + (row < bucket.tokens % rows) for row in range(rows)]
    lengths = [min(share, room) for share in shares]
    contexts = [min(room // 2, room - length) for length in lengths]
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

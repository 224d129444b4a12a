"""From a plan to work on the device: picks the bucket, packs the batch, starts step and sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from tbo_jax.batch import ForwardBatch, stack_batches
from tbo_jax.engine.decide import Decision, decide
from tbo_jax.engine.plan import ScheduledSequence, StepPlan
from tbo_jax.engine.sampler import compile_feed, compile_sampler
from tbo_jax.engine.trial import Timer
from tbo_jax.runner import ModelRunner
from tbo_jax.sampling import SamplingInputs
from tbo_jax.shapes import Bucket, sizes_between


@dataclass(frozen=True, slots=True, eq=False)
class DispatchedStep:
    """A step that was handed to the device, where it may still be running."""

    plan: StepPlan
    bucket: Bucket
    tokens: jax.Array  # [R, B] int32, the sampled token of each row
    padded: jax.Array  # the same, [R, max_sequences]
    ahead: bool  # the tokens of the step before were not read yet


class Dispatcher:
    """Holds the attention buffers and hands them from step to step.

    Every step has the shape of one of a few buckets, all compiled by `compile_all`. A step with one
    token a sequence takes the smallest decode bucket that holds its rows, any other the smallest
    prefill bucket that holds its tokens. The bucket is chosen from the counts of all ranks, so
    that all of them run the same program.
    """

    def __init__(self, runner: ModelRunner, max_sequences: int) -> None:
        """Args:
        runner: compiles and runs the step.
        max_sequences: most sequences of one step on one rank.
        """
        self.runner = runner
        self.max_sequences = max_sequences
        rows = sizes_between(1, max_sequences, 2)
        tokens = sizes_between(16, runner.cache.max_tokens, 4)
        self._decode_buckets = [Bucket(n, n, True) for n in rows]
        self._prefill_buckets = [Bucket(n, max_sequences) for n in tokens]
        self._buffers = runner.allocate()
        self._samplers: dict[int, jax.stages.Compiled] = {}  # by rows
        self._feeds: dict[int, jax.stages.Compiled] = {}  # by tokens

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes of all steps."""
        return [*self._decode_buckets, *self._prefill_buckets]

    def compile_all(
        self,
        progress: Callable[[int, int], None] | None = None,
        timer: Timer | None = None,
        *,
        look_ahead: bool = True,
    ) -> dict[Bucket, Decision]:
        """Compile every program that `dispatch` may run; see `Engine.warm_up`.

        With `look_ahead` it may be told of a step before.

        Returns:
            What was decided of each bucket with `USE_TBO=auto`, where what the cache held is lost.
        """
        decisions: dict[Bucket, Decision] = {}
        if self.runner.overlap.mode == "auto":
            decisions, self._buffers = decide(
                self.runner, self.buckets, self._buffers, timer=timer, progress=progress
            )
        else:
            self.runner.compile_all(self.buckets, progress)
        for bucket in self.buckets:
            self._sampler(bucket.sequences)
            if look_ahead:
                self._feed(bucket.tokens)
        return decisions

    def dispatch(
        self, plan: StepPlan, seeds: Mapping[int, int], before: DispatchedStep | None = None
    ) -> DispatchedStep:
        """Start a step and its sampling; returns without waiting for either.

        Args:
            plan: with one sequence or more.
            seeds: request id -> seed.
            before: the step whose tokens the unread ones of `plan` are.
        """
        bucket = self._bucket(plan)
        batch = stack_batches([self._pack(rank, bucket) for rank in plan.ranks])
        if before is not None and batch.token_ids.min() < 0:
            batch = dataclasses.replace(batch, token_ids=self._feed_tokens(batch, before))
        logits, self._buffers = self.runner.step(bucket, self._buffers, batch)
        inputs = [_sampling_inputs(rank, seeds, bucket.sequences) for rank in plan.ranks]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)
        tokens, padded = self._sampler(bucket.sequences)(logits, stacked)
        tokens.copy_to_host_async()  # while the next step runs
        return DispatchedStep(plan, bucket, tokens, padded, before is not None)

    def recover(self) -> None:
        """Be ready for new requests after a step that was interrupted or failed.

        The buffers were donated to it, so the cache may be gone.
        """
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._buffers)):
            self._buffers = self.runner.allocate()

    def _bucket(self, plan: StepPlan) -> Bucket:
        rows = max(len(rank) for rank in plan.ranks)
        tokens = max(plan.num_tokens)
        if all(sequence.num_tokens == 1 for sequence in plan.sequences):
            return next(b for b in self._decode_buckets if b.sequences >= rows)
        return next(b for b in self._prefill_buckets if b.tokens >= tokens)

    def _pack(self, sequences: Sequence[ScheduledSequence], bucket: Bucket) -> ForwardBatch:
        requests = [s.request for s in sequences]
        starts = [r.num_computed for r in requests]
        return ForwardBatch.pack(
            [
                s.request.token_ids[start : start + s.num_tokens]
                for s, start in zip(sequences, starts, strict=True)
            ],
            starts,
            [r.pages for r in requests],
            token_capacity=bucket.tokens,
            sequence_capacity=bucket.sequences,
            pages_per_sequence=self.runner.cache.pages_per_sequence,
        )

    def _feed_tokens(self, batch: ForwardBatch, before: DispatchedStep) -> jax.Array:
        """The token ids [R, T] with those of the step before in place of the unread ones."""
        capacity = batch.token_capacity
        if before.tokens.shape[-1] == capacity:
            slots = np.arange(capacity)
            live = slots < batch.num_tokens[:, None]
            if np.array_equal(batch.token_ids, np.where(live, -1 - slots, 0)):
                return before.tokens  # row for row; what pads them is never read
        return self._feed(capacity)(batch.token_ids, before.padded)

    def _sampler(self, rows: int) -> jax.stages.Compiled:
        if rows not in self._samplers:
            self._samplers[rows] = compile_sampler(
                self.runner.mesh, rows, self.runner.config.vocab_size, self.max_sequences
            )
        return self._samplers[rows]

    def _feed(self, tokens: int) -> jax.stages.Compiled:
        if tokens not in self._feeds:
            self._feeds[tokens] = compile_feed(self.runner.mesh, tokens, self.max_sequences)
        return self._feeds[tokens]


def _sampling_inputs(
    sequences: Sequence[ScheduledSequence], seeds: Mapping[int, int], rows: int
) -> SamplingInputs:
    requests = [s.request for s in sequences]
    return SamplingInputs.from_rows(
        [r.params for r in requests],
        [seeds[r.request_id] for r in requests],
        [r.num_generated for r in requests],
        rows,
    )

"""From a plan to work on the device: picks the bucket, packs the batch, starts step and sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.engine.auto.decide import Decision, decide
from tbo_jax.engine.auto.trial import Timer
from tbo_jax.engine.option_rows import OptionRows, Options
from tbo_jax.engine.sampler import compile_feed, compile_sampler
from tbo_jax.engine.scheduling.plan import ScheduledSequence, StepPlan
from tbo_jax.overlap.batch import ForwardBatch, stack_batches
from tbo_jax.parallel.processes import over_ranks
from tbo_jax.sampling.draw import SamplingInputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, sizes_between


@dataclass(frozen=True, slots=True, eq=False)
class DispatchedStep:
    """A step that was handed to the device, where it may still be running."""

    plan: StepPlan
    bucket: Bucket
    tokens: jax.Array  # [R, B] int32, the sampled token of each row, or with drafts [R, T]
    padded: jax.Array  # the same, [R, max_sequences] or more
    readable: jax.Array  # the same as `tokens`, for the host, and with `NOT_FINITE`
    ahead: bool  # the tokens of the step before were not read yet
    described: jax.Array | None = None  # [R, B or T, ...] int32, where log-probabilities are wanted

    def read(self) -> list[list[int]]:
        """Waits for the tokens: of each sequence the one after its last token and each draft.

        `NOT_FINITE` stands where logits were not. What a sequence that does not sample has there
        means nothing.
        """
        return self._by_sequence(np.asarray(self.readable).tolist())

    def read_described(self) -> list[np.ndarray] | None:
        """Waits for the log-probabilities of each token that `read` gives; None without any.

        A row of each sequence's array is one of `sampling.options.describe`.
        """
        return None if self.described is None else self._by_sequence(np.asarray(self.described))

    def _by_sequence(self, values: Any) -> list[Any]:
        """Rows of the logits [R][B] -> of each sequence its own."""
        found = []
        for rank, rows in zip(self.plan.ranks, values, strict=True):
            start = 0
            for sequence in rank:
                stop = start + len(sequence.drafts) + 1
                found.append(rows[start:stop])
                start = stop
        return found


def buckets_of(
    max_tokens: int, max_sequences: int, drafts: int
) -> tuple[list[Bucket], list[Bucket], list[Bucket]]:
    """The shapes of steps that decode, that verify drafts, and of all others; largest ones last."""
    decode = [Bucket(n, n, True) for n in sizes_between(1, max_sequences, 2)]
    verify = [
        Bucket(min(n * (drafts + 1), max_tokens), n, True, drafts)
        for n in sizes_between(1, max_sequences, 4)
        if drafts
    ]
    return decode, verify, [Bucket(n, max_sequences) for n in sizes_between(16, max_tokens, 4)]


class Dispatcher:
    """Holds the attention buffers and hands them from step to step.

    They are allocated when all is compiled: XLA:GPU tries kernels out while it compiles, and needs
    memory for that.

    Every step has the shape of one of a few buckets, all compiled by `compile_all`. A step with one
    token a sequence takes the smallest decode bucket that holds its rows, one with drafts the
    smallest verify bucket, any other the smallest prefill bucket that holds its tokens. The bucket
    is chosen from the counts of all ranks, so that all of them run the same program.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_sequences: int,
        drafts: int = 0,
        max_logprobs: int | None = None,
    ) -> None:
        """Args:
        runner: compiles and runs the step.
        max_sequences: most sequences of one step on one rank.
        drafts: most draft tokens of a sequence.
        max_logprobs: of options of requests (`OptionRows`); None: no request has any.
        """
        self.runner = runner
        self.max_sequences = max_sequences
        self._decode_buckets, self._verify_buckets, self._prefill_buckets = buckets_of(
            runner.cache.max_tokens, max_sequences, drafts
        )
        self._allocated: AttentionBuffers | None = None
        self._samplers: dict[int, jax.stages.Compiled] = {}  # by rows
        self._feeds: dict[int, jax.stages.Compiled] = {}  # by tokens
        self._options = None
        if max_logprobs is not None:
            vocabulary = runner.config.vocab_size
            self._options = OptionRows(runner.mesh, max_sequences, vocabulary, max_logprobs)

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes of all steps."""
        return [*self._decode_buckets, *self._verify_buckets, *self._prefill_buckets]

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
            self._free()
            decisions, self._allocated = decide(
                self.runner, self.buckets, timer=timer, progress=progress
            )
        else:
            self.runner.compile_all(self.buckets, progress)
        for bucket in self.buckets:
            self._sampler(sampled_rows(bucket))
            if self._options is not None:
                self._options.compile(sampled_rows(bucket))
            if look_ahead:
                self._feed(bucket.tokens)
        self._buffers()
        return decisions

    def dispatch(
        self,
        plan: StepPlan,
        seeds: Mapping[int, int],
        before: DispatchedStep | None = None,
        options: Options = MappingProxyType({}),
    ) -> DispatchedStep:
        """Start a step and its sampling; returns without waiting for either.

        Args:
            plan: with one sequence or more.
            seeds: request id -> seed.
            before: the step whose tokens the unread ones of `plan` are.
            options: of its requests that have any; `max_logprobs` must have been given for them.
        """
        bucket = self.bucket_of(plan)
        batch = stack_batches([self._pack(rank, bucket) for rank in plan.ranks])
        if before is not None and batch.token_ids.min() < 0:
            batch = dataclasses.replace(batch, token_ids=self._feed_tokens(batch, before))
        logits, self._allocated = self.runner.step(bucket, self._buffers(), batch)
        rows = sampled_rows(bucket)
        packed = np.stack([_sampling_inputs(rank, seeds, rows).packed() for rank in plan.ranks])
        inputs = over_ranks(packed, self.runner.mesh)
        asked = self._options if options else None
        assert asked is not None or not options
        wanted, described = logits, None
        if asked is not None:
            fed = None if before is None else before.padded
            wanted = asked.change(plan, options, logits, fed)
        tokens, padded, readable = self._sampler(rows)(wanted, inputs)
        if asked is not None:
            described = asked.describe(plan, options, logits, tokens)
        for array in (readable, described):
            if array is not None:
                array.copy_to_host_async()  # while the next step runs
        ahead = before is not None
        return DispatchedStep(plan, bucket, tokens, padded, readable, ahead, described)

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """The shape of a step: of all ranks, those without tokens included."""
        rows = max(len(rank) for rank in plan.ranks)
        tokens = max(plan.num_tokens)
        if plan.num_drafts:
            fits = (b for b in self._verify_buckets if b.sequences >= rows and b.tokens >= tokens)
            return next(fits)
        if all(sequence.num_tokens == 1 for sequence in plan.sequences):
            return next(b for b in self._decode_buckets if b.sequences >= rows)
        return next(b for b in self._prefill_buckets if b.tokens >= tokens)

    def recover(self) -> None:
        """Be ready for new steps after one that was interrupted or failed; the cache is lost.

        The buffers were donated to it: they may be gone, or hold its error.
        """
        self._free()
        if self._options is not None:
            self._options.forget()

    def _buffers(self) -> AttentionBuffers:
        if self._allocated is None:
            self._allocated = self.runner.allocate()
        return self._allocated

    def _free(self) -> None:
        for leaf in jax.tree.leaves(self._allocated):
            if not leaf.is_deleted():
                leaf.delete()
        self._allocated = None

    def _pack(self, sequences: Sequence[ScheduledSequence], bucket: Bucket) -> ForwardBatch:
        return ForwardBatch.pack(
            [s.token_ids for s in sequences],
            [s.request.num_computed for s in sequences],
            [s.request.pages for s in sequences],
            token_capacity=bucket.tokens,
            sequence_capacity=bucket.sequences,
            pages_per_sequence=self.runner.cache.pages_per_sequence,
            page_size=self.runner.cache.page_size,
        )

    def _feed_tokens(self, batch: ForwardBatch, before: DispatchedStep) -> jax.Array:
        """The token ids [R, T] with those of the step before in place of the unread ones."""
        capacity = batch.token_capacity
        if before.tokens.shape[-1] == capacity:
            slots = np.arange(capacity)
            live = slots < batch.num_tokens[:, None]
            if np.array_equal(batch.token_ids, np.where(live, -1 - slots, 0)):
                return before.tokens  # row for row; what pads them is never read
        ids = over_ranks(batch.token_ids, self.runner.mesh)
        return self._feed(capacity)(ids, before.padded)

    def _sampler(self, rows: int) -> jax.stages.Compiled:
        if rows not in self._samplers:
            width = max(rows, self.max_sequences)
            vocabulary = self.runner.config.vocab_size
            self._samplers[rows] = compile_sampler(self.runner.mesh, rows, vocabulary, width)
        return self._samplers[rows]

    def _feed(self, tokens: int) -> jax.stages.Compiled:
        if tokens not in self._feeds:
            self._feeds[tokens] = compile_feed(self.runner.mesh, tokens, self.max_sequences)
        return self._feeds[tokens]


def sampled_rows(bucket: Bucket) -> int:
    """Rows of the logits: one a sequence, or with drafts one a token."""
    return bucket.tokens if bucket.drafts else bucket.sequences


def _sampling_inputs(
    sequences: Sequence[ScheduledSequence], seeds: Mapping[int, int], rows: int
) -> SamplingInputs:
    sampled = [(s.request, index) for s in sequences for index in range(len(s.drafts) + 1)]
    return SamplingInputs.from_rows(
        [request.params for request, _ in sampled],
        [seeds[request.request_id] for request, _ in sampled],
        [request.num_generated + index for request, index in sampled],
        rows,
    )

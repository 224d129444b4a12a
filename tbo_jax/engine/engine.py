"""The decode loop: schedule, run the model, sample, commit, stream text."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tbo_jax.batch import ForwardBatch, stack_batches
from tbo_jax.engine.decide import decide
from tbo_jax.engine.plan import ScheduledSequence, StepPlan
from tbo_jax.engine.request import FinishReason, Request
from tbo_jax.engine.sampler import compile_sampler
from tbo_jax.engine.scheduler import Scheduler
from tbo_jax.engine.trial import Timer
from tbo_jax.runner import ModelRunner
from tbo_jax.sampling import SamplingInputs
from tbo_jax.sampling_params import MAX_SEED, SamplingParams
from tbo_jax.shapes import Bucket, sizes_between
from tbo_jax.text import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token. Joined over a request, `text` is its whole text.

    A prompt that cannot run gives one event, with finish reason "error" and without ids.
    """

    request_id: int | None
    token_id: int | None
    text: str  # what became readable with it; "" while a character or a stop string is incomplete
    finish_reason: FinishReason | None  # set with the last token


@dataclass(slots=True)
class EngineStatistics:
    """Counts and times since the engine was made. Times in seconds."""

    steps: int = 0
    steps_split: int = 0  # run as several micro-batches
    generated_tokens: int = 0  # without end-of-sequence tokens
    prompt_tokens: int = 0
    step_seconds: float = 0.0
    compile_seconds: float = 0.0
    steps_by_bucket: dict[str, int] = field(default_factory=dict)
    # Of USE_TBO=auto, by bucket: micro_batches, seconds by their number, and the reason.
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """What the engine keeps of a request beside the scheduler's part."""

    request: Request
    stream: TextStream
    seed: int


class Engine:
    """Requests in, tokens out; holds the attention buffers and hands them from step to step.

    Every step has the shape of one of a few buckets, all compiled by `warm_up`. A step with one
    token a sequence takes the smallest decode bucket that holds its rows, any other the smallest
    prefill bucket that holds its tokens. The bucket is chosen from the counts of all ranks, so
    that all of them run the same program.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        end_of_sequence: frozenset[int],
        *,
        max_sequences: int,
        max_context: int,
    ):
        """Args:
        runner: compiles and runs the step.
        tokenizer: for the text of the tokens.
        end_of_sequence: ids that end a generation.
        max_sequences: most sequences of one step on one rank.
        max_context: most tokens of a request, prompt and generated together.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.end_of_sequence = end_of_sequence
        self.max_sequences = max_sequences
        self.max_context = max_context
        cache = runner.cache
        self.scheduler = Scheduler(
            runner.mesh.size,
            cache.num_pages,
            cache.page_size,
            max_sequences,
            cache.max_tokens,
            max_context,
        )
        self.statistics = EngineStatistics()
        self._buffers = runner.allocate()
        self._samplers: dict[int, jax.stages.Compiled] = {}
        self._running: dict[int, _Running] = {}
        self._next_id = 0
        rows, tokens = sizes_between(1, max_sequences, 2), sizes_between(16, cache.max_tokens, 4)
        self._decode_buckets = [Bucket(n, n, True) for n in rows]
        self._prefill_buckets = [Bucket(n, max_sequences) for n in tokens]

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes of all steps."""
        return [*self._decode_buckets, *self._prefill_buckets]

    def warm_up(
        self, progress: Callable[[int, int], None] | None = None, timer: Timer | None = None
    ) -> None:
        """Compile every step and sampler; after that nothing compiles.

        With `USE_TBO=auto` this also decides which buckets are split (`decide`).

        Args:
            progress: called with (compiled, in all).
            timer: takes the times to decide from, on any platform; default the wall clock.

        Raises:
            RuntimeError: steps would be timed, and overwrite the pages of unfinished requests.
        """
        start = time.perf_counter()
        if self.runner.overlap.mode == "auto":
            if self.has_work:
                raise RuntimeError("warm_up would overwrite the pages of unfinished requests")
            decisions, self._buffers = decide(
                self.runner, self.buckets, self._buffers, timer=timer, progress=progress
            )
            self.statistics.decisions = {str(b): d.to_json() for b, d in decisions.items()}
        else:
            self.runner.compile_all(self.buckets, progress)
        for bucket in self.buckets:
            self._sampler(bucket.sequences)
        self.statistics.compile_seconds += time.perf_counter() - start

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; returns its id.

        Raises:
            ValueError: empty or too long prompt, or a token id outside the vocabulary.
        """
        vocabulary = self.runner.config.vocab_size
        for token in prompt_token_ids:
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt token id {token} is outside the vocabulary of {vocabulary}"
                )
        stream = TextStream(self.tokenizer, params.stop)
        request = Request(self._next_id, tuple(prompt_token_ids), params)
        self.scheduler.add(request)
        self._next_id += 1
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        self._running[request.request_id] = _Running(request, stream, seed)
        self.statistics.prompt_tokens += len(request.prompt_token_ids)
        return request.request_id

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def abort(self, request_id: int) -> None:
        """Forget a request, whatever its state."""
        if self._running.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)

    def check(self) -> None:
        """Verify the books of pages and tokens; RuntimeError names what does not add up."""
        self.scheduler.check()

    def step(self) -> list[TokenEvent]:
        """Run one step over all ranks; returns an event for each sampled token."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        try:
            events = self._run(plan)
        except BaseException:
            self._give_up(plan)
            raise
        self.statistics.step_seconds += time.perf_counter() - start
        return events

    def _give_up(self, plan: StepPlan) -> None:
        """A step was interrupted or failed: drop all requests, and be ready for new ones.

        The buffers were donated to the step, so the cache may be gone.
        """
        with contextlib.suppress(RuntimeError):  # it was committed already
            self.scheduler.discard(plan)
        for request_id in list(self._running):
            self.abort(request_id)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._buffers)):
            self._buffers = self.runner.allocate()

    def _run(self, plan: StepPlan) -> list[TokenEvent]:
        bucket = self._bucket(plan)
        batch = stack_batches([self._pack(rank, bucket) for rank in plan.ranks])
        logits, self._buffers = self.runner.step(bucket, self._buffers, batch)
        inputs = [self._sampling_inputs(rank, bucket.sequences) for rank in plan.ranks]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)
        tokens = np.asarray(self._sampler(bucket.sequences)(logits, stacked))
        events = self._commit(plan, tokens)
        self._count(bucket)
        return events

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

    def _sampling_inputs(self, sequences: Sequence[ScheduledSequence], rows: int) -> SamplingInputs:
        requests = [s.request for s in sequences]
        return SamplingInputs.from_rows(
            [r.params for r in requests],
            [self._running[r.request_id].seed for r in requests],
            [r.num_generated for r in requests],
            rows,
        )

    def _sampler(self, rows: int) -> jax.stages.Compiled:
        """The compiled sampler of `rows` rows a rank: logits [R, B, V], inputs -> tokens [R, B]."""
        if rows not in self._samplers:
            vocab_size = self.runner.config.vocab_size
            self._samplers[rows] = compile_sampler(self.runner.mesh, rows, vocab_size)
        return self._samplers[rows]

    def _commit(self, plan: StepPlan, tokens: np.ndarray) -> list[TokenEvent]:
        """Book the sampled tokens [R, B], and turn them into text."""
        sampled: dict[int, int] = {}
        text: dict[int, str] = {}
        stopped: set[int] = set()
        for rank, sequences in enumerate(plan.ranks):
            for row, sequence in enumerate(sequences):
                if not sequence.samples:
                    continue
                request = sequence.request
                token = int(tokens[rank, row])
                sampled[request.request_id] = token
                running = self._running[request.request_id]
                if token in self.end_of_sequence and not request.params.ignore_eos:
                    text[request.request_id] = ""
                    stopped.add(request.request_id)
                    continue
                self.statistics.generated_tokens += 1
                text[request.request_id] = running.stream.push(token)
                if running.stream.stopped:
                    stopped.add(request.request_id)
        for request in self.scheduler.commit(plan, sampled, stopped):
            stream = self._running[request.request_id].stream
            was_stopped = stream.stopped
            text[request.request_id] += stream.finish()
            if stream.stopped and not was_stopped:  # a stop string in what had been held back
                request.finish_reason = "stop"
        return [
            TokenEvent(i, token, text[i], self._running[i].request.finish_reason)
            for i, token in sampled.items()
        ]

    def pop(self, request_id: int) -> tuple[Request, str]:
        """Take a finished request out of the engine: the request, and its text."""
        running = self._running.pop(request_id)
        return running.request, running.stream.text

    def _count(self, bucket: Bucket) -> None:
        stats = self.statistics
        count = self.runner.micro_batches(bucket)
        stats.steps += 1
        stats.steps_split += count > 1
        name = f"{bucket} x{count}"
        stats.steps_by_bucket[name] = stats.steps_by_bucket.get(name, 0) + 1

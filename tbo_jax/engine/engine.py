"""The decode loop: schedule, dispatch, read the tokens, commit, stream text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tbo_jax.engine.dispatch import DispatchedStep, Dispatcher
from tbo_jax.engine.plan import StepPlan
from tbo_jax.engine.request import FinishReason, Request
from tbo_jax.engine.scheduler import Scheduler
from tbo_jax.engine.trial import Timer
from tbo_jax.runner import ModelRunner
from tbo_jax.sampling_params import MAX_SEED, SamplingParams
from tbo_jax.shapes import Bucket
from tbo_jax.sharding import num_ranks
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
    """Counts and times since the engine was made. Times in seconds.

    A step that was dispatched, and whose requests all turned out to be over, does not count.
    """

    steps: int = 0
    steps_split: int = 0  # run as several micro-batches
    steps_ahead: int = 0  # dispatched before the tokens of the step before were read
    generated_tokens: int = 0  # without end-of-sequence tokens
    prompt_tokens: int = 0
    step_seconds: float = 0.0
    compile_seconds: float = 0.0
    link_bytes: int = 0  # sent by a device to others; with a ragged transport the most it can be
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
    """Requests in, tokens out.

    With `look_ahead` the device does not wait for the host: while it runs a step, the next one is
    planned and dispatched, with the tokens of the first taken from where they are, on the device.
    Only then the host waits for them and makes text of them. What the next step computed for a
    request that they end is thrown away. Tokens and text are those of an engine without it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        end_of_sequence: frozenset[int],
        *,
        max_sequences: int,
        max_context: int,
        look_ahead: bool = True,
    ):
        """Args:
        runner: compiles and runs the step.
        tokenizer: for the text of the tokens.
        end_of_sequence: ids that end a generation.
        max_sequences: most sequences of one step on one rank.
        max_context: most tokens of a request, prompt and generated together.
        look_ahead: dispatch a step before the tokens of the one before are read, except where it
            has to preempt.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.end_of_sequence = end_of_sequence
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.look_ahead = look_ahead
        cache = runner.cache
        self.scheduler = Scheduler(
            num_ranks(runner.mesh),
            cache.num_pages,
            cache.page_size,
            max_sequences,
            cache.max_tokens,
            max_context,
        )
        self.statistics = EngineStatistics()
        self._dispatcher = Dispatcher(runner, max_sequences)
        self._dispatched: DispatchedStep | None = None  # ahead, its tokens not read
        self._running: dict[int, _Running] = {}
        self._next_id = 0

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes of all steps."""
        return self._dispatcher.buckets

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
        if self.runner.overlap.mode == "auto" and self.has_work:
            raise RuntimeError("warm_up would overwrite the pages of unfinished requests")
        decisions = self._dispatcher.compile_all(progress, timer, look_ahead=self.look_ahead)
        self.statistics.decisions = {str(b): d.to_json() for b, d in decisions.items()}
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
            self._drop_dead_step()

    def check(self) -> None:
        """Verify the books of pages and tokens; RuntimeError names what does not add up."""
        self.scheduler.check()

    def step(self) -> list[TokenEvent]:
        """Finish one step over all ranks; returns an event for each token that it sampled."""
        start = time.perf_counter()
        try:
            events = self._step()
        except BaseException:
            self._give_up()
            raise
        self.statistics.step_seconds += time.perf_counter() - start
        return events

    def _step(self) -> list[TokenEvent]:
        step = self._dispatched or self._dispatch()
        self._dispatched = None
        if step is None:
            return []
        if self.look_ahead:
            self.scheduler.advance(step.plan)
            if not self.scheduler.must_preempt:
                self._dispatched = self._dispatch(step)
        tokens = np.asarray(step.tokens)
        self._count(step)
        events = self._commit(step.plan, tokens)
        self._drop_dead_step()
        return events

    def _dispatch(self, before: DispatchedStep | None = None) -> DispatchedStep | None:
        """Plan and start the next step; None if there is nothing to compute."""
        plan = self.scheduler.schedule()
        if not plan.sequences:
            self.scheduler.discard(plan)
            return None
        seeds = {
            s.request.request_id: self._running[s.request.request_id].seed for s in plan.sequences
        }
        return self._dispatcher.dispatch(plan, seeds, before)

    def _drop_dead_step(self) -> None:
        """Do not wait for a step of which nothing is wanted any more."""
        if self._dispatched is not None and self._dispatched.plan.is_dead:
            self.scheduler.discard(self._dispatched.plan)
            self._dispatched = None

    def _give_up(self) -> None:
        """A step was interrupted or failed: drop all requests, and be ready for new ones."""
        self._dispatched = None
        self._running.clear()
        self.scheduler.reset()
        self._dispatcher.recover()

    def _commit(self, plan: StepPlan, tokens: np.ndarray) -> list[TokenEvent]:
        """Book the sampled tokens [R, W], and turn them into text."""
        sampled: dict[int, int] = {}
        text: dict[int, str] = {}
        stopped: set[int] = set()
        for rank, sequences in enumerate(plan.ranks):
            for row, sequence in enumerate(sequences):
                request = sequence.request
                if not sequence.samples or request.is_finished:
                    continue
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

    def _count(self, step: DispatchedStep) -> None:
        stats = self.statistics
        count = self.runner.micro_batches(step.bucket)
        stats.steps += 1
        stats.steps_split += count > 1
        stats.steps_ahead += step.ahead
        stats.link_bytes += self.runner.link_bytes(step.bucket)
        name = f"{step.bucket} x{count}"
        stats.steps_by_bucket[name] = stats.steps_by_bucket.get(name, 0) + 1

"""The decode loop: schedule, dispatch, read the tokens, commit, stream text."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tbo_jax.engine.auto.trial import Timer
from tbo_jax.engine.config import takes_drafts
from tbo_jax.engine.dispatch import DispatchedStep, Dispatcher
from tbo_jax.engine.prompt_lookup import prompt_lookup
from tbo_jax.engine.request_options import RequestOptions, request_options
from tbo_jax.engine.scheduling.plan import StepPlan
from tbo_jax.engine.scheduling.request import FinishReason, Request
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.engine.sharing import FairLock
from tbo_jax.engine.statistics import EngineStatistics
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.sampling.draw import NOT_FINITE
from tbo_jax.sampling.logprobs import TokenLogprobs, read_described
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket
from tbo_jax.text import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token, or an end without one. Joined over a request, `text` is its whole text.

    A request that was aborted, or whose logits are not finite, ends with an event without a token.
    A prompt that cannot run gives one event, with finish reason "error" and without ids.
    """

    request_id: int | None
    token_id: int | None
    text: str  # what became readable with it; "" while a character or a stop string is incomplete
    finish_reason: FinishReason | None  # set in the last event
    logprobs: TokenLogprobs | None = None  # of the token, where they were asked for
    sample: int = 0  # with `n` completions of a prompt, which of them


@dataclass(slots=True)
class _Running:
    """What the engine keeps of a request beside the scheduler's part."""

    request: Request
    stream: TextStream
    seed: int
    owner: Hashable
    options: RequestOptions | None
    takes_drafts: bool


class Engine:
    """Requests in, tokens out. Its methods may be called from several threads.

    Several callers may share it: each adds its requests as their `owner`, and its `step` returns
    the events of these. Whoever calls `step` computes for all.

    With `look_ahead` the device does not wait for the host: while it runs a step, the next one is
    planned and dispatched, with the tokens of the first taken from where they are, on the device.
    Only then the host waits for them and makes text of them. What the next step computed for a
    request that they end is thrown away. Tokens and text are those of an engine without it.

    With `speculate` a decode verifies draft tokens beside the one that is due, and keeps as many as
    are the tokens that decoding one by one gives (`ScheduledSequence.accept`), greedy or drawn. The
    drafts follow from tokens on the host, so that there is no look-ahead then; and steps that
    compute prompts have none. Tokens and text are those of an engine without it, as far as
    rounding goes: programs of another shape may sum in another order.

    With `prefix_cache` a prompt that begins like another one takes the full pages of keys and
    values that are there (`Scheduler`). Tokens and text are those of an engine without it, again as
    far as rounding goes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        end_of_sequence: frozenset[int],
        *,
        max_sequences: int,
        max_context: int,
        look_ahead: bool | None = None,
        speculate: int = 0,
        propose: Callable[[Sequence[int], int], Sequence[int]] = prompt_lookup,
        prefix_cache: bool = True,
        max_logprobs: int | None = None,
    ):
        """Args:
        runner: compiles and runs the step.
        tokenizer: for the text of the tokens.
        end_of_sequence: ids that end a generation.
        max_sequences: most sequences of one step on one rank.
        max_context: most tokens of a request, prompt and generated together.
        look_ahead: dispatch a step before the tokens of the one before are read, except where it
            has to preempt. Default: unless `speculate`.
        speculate: most draft tokens that a decode verifies; 0: none.
        propose: (tokens of a request, N) -> drafts of the next ones, ids of the vocabulary; of
            more than N the first N count.
        prefix_cache: find the pages of earlier requests again.
        max_logprobs: most `logprobs` that a request may ask for; None: neither these nor any other
            option that changes logits.

        Raises:
            ValueError: `speculate` is negative, more than a step has tokens for, or together with
                `look_ahead`; the runner's batches hold more than tokens.
        """
        if runner.inputs != Inputs():
            raise ValueError(f"the runner has {runner.inputs}: an engine makes batches of tokens")
        drafts = takes_drafts(speculate, runner.cache.max_tokens, look_ahead)
        self.runner = runner
        self.tokenizer = tokenizer
        self.end_of_sequence = end_of_sequence
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.look_ahead = not drafts if look_ahead is None else look_ahead
        self.speculate = speculate
        self.max_logprobs = max_logprobs
        self._propose = propose
        cache = runner.cache
        self.scheduler = Scheduler(
            num_ranks(runner.mesh),
            cache.num_pages,
            cache.page_size,
            max_sequences,
            cache.max_tokens,
            max_context,
            prefix_cache,
        )
        self.statistics = EngineStatistics()
        self._dispatcher = Dispatcher(runner, max_sequences, speculate, max_logprobs)
        self._dispatched: DispatchedStep | None = None  # ahead, its tokens not read
        self._running: dict[int, _Running] = {}  # until they are taken out
        self._events: dict[Hashable, list[TokenEvent]] = {}  # by owner, not returned yet
        self._next_id = 0
        self._lock = FairLock()

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
        with self._lock:
            start = time.perf_counter()
            if self.runner.overlap.mode == "auto" and self.scheduler.has_work:
                raise RuntimeError("warm_up would overwrite the pages of unfinished requests")
            if not self.scheduler.has_work:
                self.scheduler.forget_pages()  # which steps that are timed overwrite
            decisions = self._dispatcher.compile_all(progress, timer, look_ahead=self.look_ahead)
            self.statistics.decisions = {str(b): d.to_json() for b, d in decisions.items()}
            self.statistics.compile_seconds += time.perf_counter() - start

    def add(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        owner: Hashable = None,
        salt: str = "",
    ) -> int:
        """Queue a request; returns its id.

        Args:
            prompt_token_ids: ids of the vocabulary, one or more.
            params: what is asked for.
            owner: whose `step` returns its events.
            salt: it shares pages only with requests of the same one. Whoever does not know it
                cannot learn from the time that a prompt takes what others have asked.

        Raises:
            ValueError: `params` are no `SamplingParams`, ask for several completions, or for what
                this model or engine cannot (`request_options`); the prompt is empty or too long, or
                not of token ids: integers from 0 up to the size of the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r:.80}: expected SamplingParams")
        ids = self._token_ids(prompt_token_ids)
        if params.n != 1:
            raise ValueError(f"SamplingParams.n is {params.n}: expected 1; an engine runs requests")
        options = request_options(
            params,
            self.tokenizer,
            self.end_of_sequence,
            self.runner.config.vocab_size,
            self.max_logprobs,
        )
        stream = self._stream(params)
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        with self._lock:
            request = Request(self._next_id, ids, params, salt)
            self.scheduler.add(request)
            self._next_id += 1
            # What a draft would be judged by depends on the drafts before it, where tokens count.
            drafts = options is None or not options.counts
            self._running[request.request_id] = _Running(
                request, stream, seed, owner, options, drafts
            )
            self.statistics.prompt_tokens += len(ids)
            return request.request_id

    def _token_ids(self, given: Iterable[Any]) -> tuple[int, ...]:
        vocabulary = self.runner.config.vocab_size
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ValueError(f"the prompt is {given!r:.80}: expected token ids")
        ids = tuple(given)
        for token in ids:
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ValueError(f"prompt token id {token!r:.80}: expected an integer")
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt token id {token} is outside the vocabulary of {vocabulary}"
                )
        return tuple(map(int, ids))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or `step()` has events to return without a step."""
        return self.scheduler.has_work or None in self._events

    def abort(self, request_id: int) -> bool:
        """End a request, with what it has so far; its last event says "abort".

        Returns:
            Whether it was unfinished. One that is finished, or not here, is left as it is.
        """
        with self._lock:
            if self.scheduler.abort(_checked_id(request_id)) is None:
                return False
            running = self._running[request_id]
            self._give(TokenEvent(request_id, None, running.stream.finish(), "abort"))
            self._drop_dead_step()
            return True

    def clear_prefix_cache(self) -> None:
        """Forget the keys and values of ended requests: the weights are other ones now.

        Raises:
            RuntimeError: a request is unfinished, and uses some.
        """
        with self._lock:
            self.scheduler.forget_pages()

    def check(self) -> None:
        """Verify the books of pages and tokens; RuntimeError names what does not add up."""
        with self._lock:
            self.scheduler.check()

    def step(self, owner: Hashable = None) -> list[TokenEvent]:
        """Finish one step over all ranks; returns an event for each token that it sampled.

        These are the events of the owner's requests. Where some wait for it, of a step that was run
        for another owner or of an abort, it gets them and no step is run.

        If the step fails or is interrupted no request is lost: what they had in the cache is
        computed anew by the next ones, with the same tokens as far as rounding goes.
        """
        with self._lock:
            if owner not in self._events:
                start = time.perf_counter()
                try:
                    self._step()
                except BaseException:
                    self._start_over()
                    raise
                self.statistics.step_seconds += time.perf_counter() - start
            return self._events.pop(owner, [])

    def holds(self, request_id: int) -> bool:
        """Whether a request is here, finished or not: it was added, and not taken out."""
        with self._lock:
            return request_id in self._running

    def counts(self) -> dict[str, Any]:
        """The statistics as they are between two steps, as plain values."""
        with self._lock:
            stats, scheduler = self.statistics, self.scheduler.statistics
            return asdict(stats) | {
                "speculate": self.speculate,
                "acceptance_rate": stats.acceptance_rate,
                "tokens_per_row": stats.tokens_per_row,
                "preemptions": scheduler.preemptions,
                "cached_tokens": scheduler.cached_tokens,
                "evictions": scheduler.evictions,
                "finished": dict(scheduler.finished),
            }

    def pop(self, request_id: int) -> tuple[Request, str]:
        """Take a finished request out of the engine: the request, and its text.

        Its events that nobody asked for are dropped.

        Raises:
            ValueError: there is no such request, or it is not finished.
        """
        with self._lock:
            running = self._running.get(_checked_id(request_id))
            if running is None:
                raise ValueError(f"there is no request {request_id!r:.80}")
            if not running.request.is_finished:
                raise ValueError(f"request {request_id} is not finished: expected abort before")
            del self._running[request_id]
            events = self._events.pop(running.owner, [])
            if kept := [event for event in events if event.request_id != request_id]:
                self._events[running.owner] = kept
            return running.request, running.stream.text

    def _step(self) -> None:
        step = self._dispatched or self._dispatch()
        self._dispatched = None
        if step is None:
            return
        if self.look_ahead:
            self.scheduler.advance(step.plan)
            if not self.scheduler.must_preempt:
                self._dispatched = self._dispatch(step)
        tokens = step.read()
        described = step.read_described()
        self._count(step)
        self._commit(step.plan, tokens, described)
        self._drop_dead_step()

    def _dispatch(self, before: DispatchedStep | None = None) -> DispatchedStep | None:
        """Plan and start the next step; None if there is nothing to compute."""
        plan = self.scheduler.schedule(self._draft if self.speculate else None)
        if not plan.sequences:
            self.scheduler.discard(plan)
            return None
        running = [self._running[s.request.request_id] for s in plan.sequences]
        seeds = {one.request.request_id: one.seed for one in running}
        options = {
            one.request.request_id: one.options for one in running if one.options is not None
        }
        return self._dispatcher.dispatch(plan, seeds, before, options)

    def _draft(self, request: Request) -> Sequence[int]:
        if not self._running[request.request_id].takes_drafts:
            return ()
        return self._propose(request.token_ids, self.speculate)[: self.speculate]

    def _drop_dead_step(self) -> None:
        """Do not wait for a step of which nothing is wanted any more."""
        if self._dispatched is not None and self._dispatched.plan.is_dead:
            self.scheduler.discard(self._dispatched.plan)
            self._dispatched = None

    def _start_over(self) -> None:
        """A step failed: have all requests wait, and be ready to compute them anew."""
        self._dispatched = None
        self.scheduler.start_over()
        self._dispatcher.recover()
        for running in self._running.values():
            request = running.request
            if not request.is_finished:  # its text may be of a token that was not booked
                running.stream = self._stream(request.params)
                for token in request.generated_token_ids:
                    running.stream.push(token)

    def _commit(
        self,
        plan: StepPlan,
        tokens: Sequence[list[int]],
        described: Sequence[np.ndarray] | None,
    ) -> None:
        """Book the tokens that were sampled of each sequence; turn them into text and events.

        `described` has the log-probabilities of each of `tokens`, if any were asked for.
        """
        sampled: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}  # for each token
        text: dict[int, list[str]] = {}  # for each token
        stopped: set[int] = set()
        failed: dict[int, str] = {}
        for place, (sequence, candidates) in enumerate(zip(plan.sequences, tokens, strict=True)):
            request = sequence.request
            if not sequence.samples or request.is_finished:
                continue
            request_id = request.request_id
            accepted = sequence.accept(candidates)
            if accepted[-1] == NOT_FINITE:
                accepted.pop()
                if sequence.drafts:
                    # That may come of a draft, whose key is in a block with those before it. The
                    # next step tells, which computes the same token without any.
                    self._running[request_id].takes_drafts = False
                else:
                    index = request.num_generated - request.has_unread
                    failed[request_id] = f"logits are not finite at generated token {index}"
            try:
                text[request_id], is_over = self._read(request, accepted)
            except ValueError as error:  # no decoder of text should, and it is nobody else's fault
                text[request_id], is_over = [], False
                failed[request_id] = f"the tokens have no text: {error}"
            sampled[request_id] = accepted[: len(text[request_id])]
            options = self._running[request_id].options
            if described is not None and options is not None and options.logprobs is not None:
                logprobs[request_id] = [
                    read_described(row, token, options.logprobs)
                    for row, token in zip(described[place], sampled[request_id], strict=False)
                ]
            if is_over:
                stopped.add(request_id)
            self.statistics.sampled_rows += bool(accepted)
            self.statistics.drafted_tokens += len(sequence.drafts)
            self.statistics.accepted_tokens += max(0, len(sampled[request_id]) - 1)
        rest: dict[int, str] = {}
        for request in self.scheduler.commit(plan, sampled, stopped, failed):
            stream = self._running[request.request_id].stream
            was_stopped = stream.stopped
            rest[request.request_id] = stream.finish()
            if stream.stopped and not was_stopped and request.error is None:
                request.finish_reason = "stop"  # a stop string in what had been held back
        for i, accepted in sampled.items():
            of_tokens = zip(accepted, text[i], logprobs.get(i, [None] * len(accepted)), strict=True)
            events = [TokenEvent(i, token, t, None, known) for token, t, known in of_tokens]
            if i in failed:
                events.append(TokenEvent(i, None, "", None))
            if i in rest:
                reason = self._running[i].request.finish_reason
                whole = events[-1].text + rest[i]
                events[-1] = dataclasses.replace(events[-1], text=whole, finish_reason=reason)
            for event in events:
                self._give(event)

    def _give(self, event: TokenEvent) -> None:
        """Keep an event until the owner of its request asks for it."""
        assert event.request_id is not None
        owner = self._running[event.request_id].owner
        self._events.setdefault(owner, []).append(event)

    def _read(self, request: Request, tokens: Sequence[int]) -> tuple[list[str], bool]:
        """The text of each token up to one that ends the request, and whether one does."""
        stream = self._running[request.request_id].stream
        text: list[str] = []
        for token in tokens:
            ends = self.ends(request.params, token)
            if ends and not request.params.include_stop_str_in_output:
                return [*text, ""], True
            self.statistics.generated_tokens += 1
            text.append(stream.push(token))
            if ends or stream.stopped:
                return text, True
        return text, False

    def ends(self, params: SamplingParams, token: int) -> bool:
        """Whether a token ends a request: an end of sequence, or one of its own."""
        return token in params.stop_token_ids or (
            token in self.end_of_sequence and not params.ignore_eos
        )

    def _stream(self, params: SamplingParams) -> TextStream:
        return TextStream(
            self.tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _count(self, step: DispatchedStep) -> None:
        stats = self.statistics
        count = self.runner.micro_batches(step.bucket)
        stats.steps += 1
        stats.steps_split += count > 1
        stats.steps_ahead += step.ahead
        stats.link_bytes += self.runner.link_bytes(step.bucket)
        name = f"{step.bucket} x{count}"
        stats.steps_by_bucket[name] = stats.steps_by_bucket.get(name, 0) + 1


def _checked_id(request_id: Any) -> int:
    if not isinstance(request_id, int) or isinstance(request_id, bool):
        raise ValueError(f"request id {request_id!r:.80}: expected an integer")
    return request_id

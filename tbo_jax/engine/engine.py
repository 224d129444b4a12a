"""The decode loop: schedule, dispatch, read the tokens, commit, tell."""

from __future__ import annotations

import contextlib
import secrets
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from tbo_jax.engine.auto.trial import Timer
from tbo_jax.engine.compiling import Compiling, check_serves_early
from tbo_jax.engine.config import check_drafts
from tbo_jax.engine.dispatch import DispatchedStep, Dispatcher, StartedStep
from tbo_jax.engine.reading import Reader
from tbo_jax.engine.request_options import RequestOptions, check_prompt_logprobs, request_options
from tbo_jax.engine.running import Language, Running, TokenEvent
from tbo_jax.engine.scheduling.plan import StepPlan
from tbo_jax.engine.scheduling.request import Request, checked_priority
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.engine.sharing import FairLock
from tbo_jax.engine.statistics import EngineStatistics
from tbo_jax.engine.structured.grammars import Grammars
from tbo_jax.engine.structured.structure import Structure
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.sampling.logprobs import PromptLogprobs
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, program_name
from tbo_jax.text import Tokenizer

T = TypeVar("T")


class Engine:
    """Requests in, tokens out. Its methods may be called from several threads.

    Several callers may share it: each adds its requests as their `owner`, and its `step` returns
    the events of these. Whoever calls `step` computes for all.

    With `look_ahead` the device does not wait for the host: while it runs a step, the next one is
    planned and dispatched, with the tokens of the first taken from where they are, on the device.
    Only then the host waits for them and makes text of them. What the next step computed for a
    request that they end is thrown away. Tokens and text are those of an engine without it. Where a
    request has a structure (`SamplingParams.structure`) the next step is started, and its tokens
    are sampled once those of the first are known: what is allowed depends on them.

    With `speculate` a decode verifies draft tokens beside the one that is due, and keeps as many as
    are the tokens that decoding one by one gives, greedy or drawn. The device finds the drafts in
    the text so far (`prompt_lookup`), so that look-ahead goes on: the host learns of a step what
    stands while the next one runs. Tokens and text are those of an engine without it, as far as
    rounding goes: programs of another shape may sum in another order. Requests with penalties
    have no drafts.

    With `prefix_cache` a prompt that begins like another one takes the full pages of keys and
    values that are there (`Scheduler`). Tokens and text are those of an engine without it, again as
    far as rounding goes.

    With a deterministic runner nothing is left to rounding: a request has the same logits, bit by
    bit, whatever else runs, with and without look-ahead, kept pages and preemption.
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
        propose: Callable[[Sequence[int], int], Sequence[int]] | None = None,
        prefix_cache: bool = True,
        max_logprobs: int | None = None,
        max_prompt_logprobs: int | None = None,
    ):
        """Args:
        runner: compiles and runs the step.
        tokenizer: for the text of the tokens.
        end_of_sequence: ids that end a generation.
        max_sequences: most sequences of one step on one rank.
        max_context: most tokens of a request, prompt and generated together.
        look_ahead: dispatch a step before the tokens of the one before are read, except where it
            has to preempt. Default: unless `propose` is given.
        speculate: most draft tokens that a decode verifies; 0: none.
        propose: finds drafts in place of the device, and on the host: (tokens of a request, N) ->
            drafts of the next ones, ids of the vocabulary; of more than N the first N count.
        prefix_cache: find the pages of earlier requests again.
        max_logprobs: most `logprobs` that a request may ask for; None: neither these nor any other
            option that changes logits.
        max_prompt_logprobs: most `prompt_logprobs` that a request may ask for; None: none do.

        Raises:
            ValueError: `speculate` is negative, more than a step has tokens for, or together with
                a deterministic runner; `look_ahead` together with `propose`; the runner's batches
                hold more than tokens.
        """
        if runner.inputs != Inputs():
            raise ValueError(f"the runner has {runner.inputs}: an engine makes batches of tokens")
        check_drafts(speculate, runner.cache.max_tokens, runner.deterministic)
        if look_ahead and propose is not None:
            raise ValueError(
                "look_ahead=True with propose: expected one of them, as it is given the tokens of "
                "the last step"
            )
        self.language = Language(tokenizer, end_of_sequence)
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.look_ahead = propose is None if look_ahead is None else look_ahead
        self.speculate = speculate
        self.max_logprobs = max_logprobs
        self.max_prompt_logprobs = max_prompt_logprobs
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
            runner.deterministic,
            speculate if propose is None else 0,
            _window(runner),
        )
        self.statistics = EngineStatistics()
        self._dispatcher = Dispatcher(
            runner,
            max_sequences,
            speculate,
            max_logprobs,
            max_prompt_logprobs,
            finds_drafts=speculate > 0 and propose is None,
        )
        self.runner = self._dispatcher.runner
        self._dispatched: DispatchedStep | None = None  # ahead, its tokens not read
        self._structures: dict[int, Structure] = {}  # of the unfinished ones that have one
        self._with_options: dict[int, RequestOptions] = {}  # of the unfinished ones that have some
        vocabulary = runner.config.vocab_size
        self._grammars = Grammars(tokenizer, end_of_sequence, vocabulary)
        self._reader = Reader(self.language, vocabulary, self.statistics)
        self._next_id = 0
        self._compiling: Compiling | None = None  # what `warm_up` left
        self._lock = FairLock()

    @property
    def tokenizer(self) -> Tokenizer:
        """For the text of the tokens."""
        return self.language.tokenizer

    @property
    def end_of_sequence(self) -> frozenset[int]:
        """The ids that end a generation."""
        return self.language.end_of_sequence

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes of all steps."""
        return self._dispatcher.buckets

    def warm_up(
        self,
        progress: Callable[[int, int], None] | None = None,
        timer: Timer | None = None,
        *,
        early: bool = False,
    ) -> None:
        """Compile every step and sampler; after that nothing compiles.

        With `USE_TBO=auto` this also decides which buckets are split (`decide`).

        With `early` it returns when the largest bucket of each kind is there, which can run every
        step. A thread compiles the others, smallest first. A step takes the smallest that is there,
        so that none waits for a compiler. Tokens are those that the engine gives without it, as far
        as rounding goes: programs of another shape may sum in another order.

        Args:
            progress: called with (compiled, in all); with `early` of those that are waited for.
            timer: takes the times to decide from, on any platform; default the wall clock.
            early: as above.

        Raises:
            RuntimeError: steps would be timed, and overwrite the pages of unfinished requests.
            ValueError: `early` with `USE_TBO=auto` or in several processes (`check_serves_early`).
        """
        if early:
            check_serves_early(self.runner.overlap)
        if self._compiling is not None:
            self._compiling.stop()
            self._compiling = None
        with self._lock:
            start = time.perf_counter()
            if self.runner.overlap.mode == "auto" and self.scheduler.has_work:
                raise RuntimeError("warm_up would overwrite the pages of unfinished requests")
            if not self.scheduler.has_work:
                self.scheduler.forget_pages()  # which steps that are timed overwrite
            if early:
                further = self._dispatcher.compile_first(progress)
            else:
                decisions, further = self._dispatcher.compile_all(progress, timer), []
                self.statistics.decisions = {str(b): d.to_json() for b, d in decisions.items()}
            self.statistics.compile_seconds += time.perf_counter() - start
        if further:
            # Neither knows this engine: it is not kept until all is compiled.
            dispatcher, statistics = self._dispatcher, self.statistics
            self._compiling = Compiling(further, dispatcher.compile_further, statistics.compiled)
            weakref.finalize(self, self._compiling.stop_soon)

    def finish_warm_up(self, seconds: float | None = None) -> bool:
        """Wait for what is compiled beside requests, or so many seconds; whether all is done."""
        return self._compiling is None or self._compiling.wait(seconds)

    def add(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        owner: Hashable = None,
        salt: str = "",
        stream: bool = True,
        priority: int = 0,
        generated: Iterable[int] = (),
    ) -> int:
        """Queue a request; returns its id.

        Args:
            prompt_token_ids: ids of the vocabulary, one or more.
            params: what is asked for.
            owner: whose `step` returns its events.
            salt: it shares pages only with requests of the same one. Whoever does not know it
                cannot learn from the time that a prompt takes what others have asked.
            stream: give an event for each token. Otherwise the last event has all the text, and
                others come only where each token is looked at anyway (log-probabilities, stop
                strings), which saves the host some of its work.
            priority: the lower, the earlier its turn; requests of one priority have theirs as they
                came (`Scheduler`). As vLLM's.
            generated: tokens that another engine gave for it until it was lost. The request goes on
                after them with what it would have given, if `params` have a seed. They count as its
                own, but have no events; neither has the text that was told with them. (Without
                `stream` the last event has all the text, theirs too.)

        Raises:
            ValueError: `params` are no `SamplingParams`, ask for several completions, or for what
                this model or engine cannot (`request_options`); the prompt is empty or too long, or
                not of token ids: integers from 0 up to the size of the vocabulary; `priority` is no
                integer; the request cannot go on after `generated`.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r:.80}: expected SamplingParams")
        priority = checked_priority(priority)
        check_prompt_logprobs(params, self.max_prompt_logprobs)
        ids = self._token_ids(prompt_token_ids)
        before = self._token_ids(generated, "generated")
        if params.n != 1:
            raise ValueError(f"SamplingParams.n is {params.n}: expected 1; an engine runs requests")
        options = request_options(
            params,
            self.tokenizer,
            self.end_of_sequence,
            self.runner.config.vocab_size,
            self.max_logprobs,
        )
        structure = self._grammars.structure(params)
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        flags = self.language.flags(params, stream=stream)
        told = None
        if params.prompt_logprobs is not None:
            told = PromptLogprobs(ids, params.prompt_logprobs)
        # What a draft would be judged by depends on the drafts before it, where tokens count.
        drafts = options is None or not options.counts
        drafts = drafts and (structure is None or structure.takes_drafts)
        with self._lock:
            request = Request(self._next_id, ids, params, salt, seed, flags, priority, told, drafts)
            request.known += before
            running = Running(request, self.language, owner, options, structure)
            if before:
                most = self.scheduler.limits.most_tokens(request) - len(ids)
                running.check_goes_on(most)
            self.scheduler.add(request)
            self._next_id += 1
            self._reader.running[request.request_id] = running
            if options is not None:
                self._with_options[request.request_id] = options
            if structure is not None:
                self._structures[request.request_id] = structure
            self.statistics.prompt_tokens += len(ids)
            return request.request_id

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of requests to come, so that `add` finds it; nobody waits for it.

        Raises:
            ValueError: it cannot be compiled, as `add`.
        """
        self._grammars.structure(params)

    def check_prompt(self, name: str, prompt_token_ids: Iterable[int]) -> None:
        """ValueError, which begins with the name, for a prompt that `add` would refuse."""
        try:
            ids = self._token_ids(prompt_token_ids)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self.scheduler.limits.check_length(name, len(ids))

    def _token_ids(self, given: Iterable[Any], name: str = "prompt") -> tuple[int, ...]:
        vocabulary = self.runner.config.vocab_size
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ValueError(f"the {name} is {given!r:.80}: expected token ids")
        ids = tuple(given)
        for token in ids:
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ValueError(f"{name} token id {token!r:.80}: expected an integer")
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name} token id {token} is outside the vocabulary of {vocabulary}"
                )
        return tuple(map(int, ids))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or `step()` has events to return without a step."""
        return self.scheduler.has_work or self._reader.has_events(None)

    def abort(self, request_id: int) -> bool:
        """End a request, with what it has so far; its last event says "abort".

        Returns:
            Whether it was unfinished. One that is finished, or not here, is left as it is.
        """
        with self._lock:
            if self.scheduler.abort(_checked_id(request_id)) is None:
                return False
            rest = self._reader.running[request_id].close()
            self._reader.give(TokenEvent(request_id, None, rest, "abort"))
            self._leave(request_id)
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
            if not self._reader.has_events(owner):
                start = time.perf_counter()
                try:
                    self._step()
                except BaseException:
                    self._start_over()
                    raise
                self.statistics.step_seconds += time.perf_counter() - start
            return self._reader.take_events(owner)

    def holds(self, request_id: int) -> bool:
        """Whether a request is here, finished or not: it was added, and not taken out."""
        with self._lock:
            return request_id in self._reader.running

    def counts(self, *, at_once: bool = False) -> dict[str, Any]:
        """The statistics as they are between two steps, as plain values.

        Args:
            at_once: do not wait for the end of a step: they may be of two. Who waits may wait for
                long, as a thread that runs step after step lets go of the engine for an instant.
        """
        with contextlib.nullcontext() if at_once else self._lock:
            stats, scheduler = self.statistics, self.scheduler.statistics
            return _values(stats) | {
                "speculate": self.speculate,
                "shapes": len(self.buckets),
                "shapes_compiled": self._dispatcher.num_there,
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
            running = self._reader.running.get(_checked_id(request_id))
            if running is None:
                raise ValueError(f"there is no request {request_id!r:.80}")
            if not running.request.is_finished:
                raise ValueError(f"request {request_id} is not finished: expected abort before")
            self._reader.drop_events(request_id)
            del self._reader.running[request_id]
            return running.request, running.text

    def _step(self) -> None:
        step = self._dispatched or self._sample(self._start())
        self._dispatched = None
        if step is None:
            return
        waiting = None  # for the tokens of this step
        if self.look_ahead:
            self.scheduler.advance(step.plan)
            if not self.scheduler.must_preempt:
                ahead = self._start(step)
                if ahead is not None and self._needs_tokens(ahead.plan):
                    waiting = ahead
                else:
                    self._dispatched = self._sample(ahead)
        self._count(step)
        self._commit(step)
        if waiting is not None:
            self._dispatched = self._sample(waiting)
        self._drop_dead_step()

    def _start(self, before: DispatchedStep | None = None) -> StartedStep | None:
        """Plan and start the next step; None if there is nothing to compute."""
        plan = self.scheduler.schedule(None if self._propose is None else self._draft)
        if not plan.has_work:
            self.scheduler.discard(plan)
            return None
        return self._dispatcher.start(plan, self.scheduler.rows, before)

    def _needs_tokens(self, plan: StepPlan) -> bool:
        """Whether it cannot be sampled before the tokens of the step before are read."""
        if self._structures and plan.has_unread(self._structures):
            return True
        # With drafts it is not known how many tokens a request has.
        changing = [i for i, one in self._with_options.items() if one.changes_logits]
        return self.speculate > 0 and plan.has_unread(changing)

    def _sample(self, started: StartedStep | None) -> DispatchedStep | None:
        if started is None:
            return None
        options = self._of_rows(self._with_options)
        return self._dispatcher.sample(started, options, self._of_rows(self._structures))

    def _of_rows(self, of: Mapping[int, T]) -> dict[int, T]:
        """Those of requests that run."""
        running = self._reader.running
        return {i: one for i, one in of.items() if running[i].request.row is not None}

    def _draft(self, request: Request) -> Sequence[int]:
        assert self._propose is not None
        structure = self._reader.running[request.request_id].structure
        drafts = self._propose(request.token_ids, self.speculate)[: self.speculate]
        return drafts if structure is None else structure.acceptable(drafts)

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
        self._reader.restart()

    def _commit(self, step: DispatchedStep) -> None:
        """Book the tokens that were sampled of each sequence; turn them into text and events."""
        read = self._reader.read(step, *self.scheduler.awaits(step.plan))
        finished = self.scheduler.commit(
            step.plan, read.tokens, read.counts, read.stopped, read.failed, read.redone
        )
        self._reader.tell(read, finished)
        for request in finished:
            self._leave(request.request_id)

    def _leave(self, request_id: int) -> None:
        """Have no more to do with the logits of a request that has ended."""
        self._with_options.pop(request_id, None)
        self._structures.pop(request_id, None)

    def leaves_out(self, params: SamplingParams, token: int) -> bool:
        """Whether the last token of a request only ends it, and is not among those it gave."""
        return self.language.ends(params, token) and not params.include_stop_str_in_output

    def _count(self, step: DispatchedStep) -> None:
        stats = self.statistics
        strategy = self.runner.strategy(step.bucket)
        stats.steps += 1
        stats.steps_split += strategy.micro_batches > 1
        stats.steps_in_chunks += strategy.expert_chunks > 1
        stats.steps_ahead += step.ahead
        stats.link_bytes += self.runner.link_bytes(step.bucket)
        name = program_name(step.bucket, strategy)
        stats.steps_by_bucket[name] = stats.steps_by_bucket.get(name, 0) + 1


def _window(runner: ModelRunner) -> int | None:
    """How many tokens a token of any layer sees at most; None if that is no less than all.

    On TPU it is not relied on: JAX's kernel may read pages before it, and they may hold NaN.
    """
    config = runner.config
    everywhere = config.sliding_window is not None and not config.full_attention_layers
    return config.sliding_window if everywhere and runner.kernels.attention.ignores_unseen else None


def _values(statistics: EngineStatistics) -> dict[str, Any]:
    while True:
        try:
            return asdict(statistics)
        except RuntimeError:  # a dictionary got an entry meanwhile, which happens once for each
            continue


def _checked_id(request_id: Any) -> int:
    if not isinstance(request_id, int) or isinstance(request_id, bool):
        raise ValueError(f"request id {request_id!r:.80}: expected an integer")
    return request_id

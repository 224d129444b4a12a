"""The decode loop: schedule, dispatch, read the tokens, commit, stream text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tbo_jax.engine.auto.trial import Timer
from tbo_jax.engine.config import check_drafts
from tbo_jax.engine.dispatch import DispatchedStep, Dispatcher, StartedStep
from tbo_jax.engine.request_options import RequestOptions, check_prompt_logprobs, request_options
from tbo_jax.engine.scheduling.plan import StepPlan
from tbo_jax.engine.scheduling.request import FinishReason, Request, checked_priority
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.engine.sharing import FairLock
from tbo_jax.engine.statistics import EngineStatistics
from tbo_jax.engine.structured.grammars import Grammars
from tbo_jax.engine.structured.structure import Structure
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.sampling.draw import NOT_FINITE
from tbo_jax.sampling.logprobs import PromptLogprobs, TokenLogprobs, read_described
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket
from tbo_jax.text import TextStream, Tokenizer, WholeTokens

T = TypeVar("T")

# Flags of requests.
IGNORES_EOS = 1
QUIET = 2  # nobody wants its tokens before it ends
SINGLE = 4  # its tokens are looked at one by one: they may end it, or need more than a look-up


class TokenEvent(NamedTuple):  # a third of the time that a frozen dataclass takes to make
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
    # Of all its tokens, if they are looked at one by one. Otherwise of those that are not whole
    # characters, and made for the first of them.
    stream: TextStream | None
    owner: Hashable
    options: RequestOptions | None
    structure: Structure | None
    text: str = ""  # when it has ended


@dataclass(slots=True)
class _Sampled:
    """What a sequence that is looked at by itself got in a step, up to what ends its request."""

    tokens: list[int]
    text: list[str]  # of each token
    is_over: bool = False
    is_redone: bool = False  # the device went on from a token that does not count
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # of each token


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
        self.tokenizer = tokenizer
        self.end_of_sequence = end_of_sequence
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
        self._running: dict[int, _Running] = {}  # until they are taken out
        self._structures: dict[int, Structure] = {}  # of the unfinished ones that have one
        vocabulary = runner.config.vocab_size
        self._grammars = Grammars(tokenizer, end_of_sequence, vocabulary)
        self._with_options: dict[int, RequestOptions] = {}  # of the unfinished ones that have some
        self._partial: set[int] = set()  # ids of those amid a character, of which no stream is kept
        self._whole = WholeTokens(tokenizer)
        self._ends = np.zeros(vocabulary, bool)
        self._ends[[token for token in end_of_sequence if token < vocabulary]] = True
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
            decisions = self._dispatcher.compile_all(progress, timer)
            self.statistics.decisions = {str(b): d.to_json() for b, d in decisions.items()}
            self.statistics.compile_seconds += time.perf_counter() - start

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
        single = _is_single(params, whole=self._whole.any or not stream)
        single = single or structure is not None
        running_stream = self._stream(params) if single else None
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        flags = IGNORES_EOS * params.ignore_eos | QUIET * (not stream) | SINGLE * single
        told = None
        if params.prompt_logprobs is not None:
            told = PromptLogprobs(ids, params.prompt_logprobs)
        # What a draft would be judged by depends on the drafts before it, where tokens count.
        drafts = options is None or not options.counts
        drafts = drafts and (structure is None or structure.takes_drafts)
        with self._lock:
            request = Request(self._next_id, ids, params, salt, seed, flags, priority, told, drafts)
            request.known += before
            running = _Running(request, running_stream, owner, options, structure)
            is_partial = self._goes_on(running)
            self.scheduler.add(request)
            self._next_id += 1
            self._running[request.request_id] = running
            if is_partial:
                self._partial.add(request.request_id)
            if options is not None:
                self._with_options[request.request_id] = options
            if structure is not None:
                self._structures[request.request_id] = structure
            self.statistics.prompt_tokens += len(ids)
            return request.request_id

    def _goes_on(self, running: _Running) -> bool:
        """Bring text and structure to where a new request's generated tokens lead.

        Returns:
            Whether they end amid a character, of a request whose tokens are not looked at singly.

        Raises:
            ValueError: the request ends with them, or before.
        """
        request = running.request
        tokens = request.generated_token_ids
        if not tokens:
            return False
        most = self.scheduler.limits.most_tokens(request) - len(request.prompt_token_ids)
        ended = any(self.ends(request.params, token) for token in tokens)
        is_partial, structure = self._restart(running), running.structure
        if structure is not None and structure.error is not None:
            raise ValueError(f"generated: {structure.error}")
        assert running.stream is not None
        complete = structure is not None and structure.matcher.is_stopped()
        if ended or complete or running.stream.stopped or len(tokens) >= most:
            raise ValueError(
                f"generated has {len(tokens)} tokens, and the request ends with them or before: "
                "expected tokens that it goes on after"
            )
        return is_partial

    def _restart(self, running: _Running) -> bool:
        """Make text and structure anew of the tokens so far; whether they end amid a character.

        Of a request whose tokens are looked at one by one the latter does not matter.
        """
        request = running.request
        running.stream = self._stream(request.params)
        for token in request.generated_token_ids:
            running.stream.push(token)
        if running.structure is not None:
            running.structure.restart(request.generated_token_ids)
        return not request.flags & SINGLE and not running.stream.is_whole

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
        return self.scheduler.has_work or None in self._events

    def abort(self, request_id: int) -> bool:
        """End a request, with what it has so far; its last event says "abort".

        Returns:
            Whether it was unfinished. One that is finished, or not here, is left as it is.
        """
        with self._lock:
            if self.scheduler.abort(_checked_id(request_id)) is None:
                return False
            rest = self._close(self._running[request_id])
            self._give(TokenEvent(request_id, None, rest, "abort"))
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
        running = self._running
        return {i: one for i, one in of.items() if running[i].request.row is not None}

    def _draft(self, request: Request) -> Sequence[int]:
        assert self._propose is not None
        structure = self._running[request.request_id].structure
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
        self._partial.clear()
        for running in self._running.values():
            # Its text may be of a token that was not booked.
            if not running.request.is_finished and self._restart(running):
                self._partial.add(running.request.request_id)

    def _commit(self, step: DispatchedStep) -> None:
        """Book the tokens that were sampled of each sequence; turn them into text and events.

        Most need no more than a comparison with the tokens that end a text, for all at once.
        """
        if step.prompts is not None:
            step.prompts.read()
        plan, of, stats = step.plan, step.plan.sampled, self.statistics
        (tokens, counts), described = step.read(), step.read_described()
        wanted, flags = self.scheduler.awaits(plan)
        one_each = tokens.shape[1] == 1
        last = tokens[:, 0] if one_each else tokens[np.arange(len(of)), np.maximum(counts - 1, 0)]
        single = (flags & SINGLE > 0) | (last == NOT_FINITE)
        plain = wanted & ~single
        stopped = plain & (flags & IGNORES_EOS == 0)
        if one_each:
            stopped &= self._ends[last]
        else:
            ends = self._ends[tokens] & (np.arange(tokens.shape[1]) < counts[:, None])
            stopped &= ends.any(axis=1)
            counts = np.where(stopped, ends.argmax(axis=1) + 1, counts)
            stats.accepted_tokens += int(counts[plain].sum() - plain.sum())
            stats.drafted_tokens += int(plan.num_drafts[wanted].sum())
        count = int(plain.sum())
        stats.sampled_rows += count
        stats.generated_tokens += count if one_each else int(counts[plain].sum())
        stats.generated_tokens -= int(stopped.sum())

        looked_at: dict[int, _Sampled] = {}
        for number in np.flatnonzero(wanted & single).tolist():
            request, new = of.requests[number], tokens[number, : counts[number]].tolist()
            told = None if described is None else described[number]
            found = self._look_at(request, bool(plan.num_drafts[number]), new, told)
            stopped[number], counts[number] = found.is_over, len(found.tokens)
            looked_at[number] = found
        finished = self.scheduler.commit(
            plan,
            tokens,
            counts,
            stopped,
            {n: found.error for n, found in looked_at.items() if found.error is not None},
            [number for number, found in looked_at.items() if found.is_redone],
        )
        rest: dict[int, list[str]] = {}  # of requests that end, by token that is not told yet
        for request in finished:
            (number,) = np.flatnonzero(of.request_ids == request.request_id).tolist()
            is_told = number in looked_at or request.flags & QUIET
            new = [] if is_told else tokens[number, : counts[number]].tolist()
            rest[request.request_id] = self._finish(request, new)

        streaming = plain & (flags & QUIET == 0)
        if streaming.any():
            request_ids, told = of.request_ids[streaming], last[streaming]
            if not one_each:
                each = np.arange(tokens.shape[1]) < counts[streaming, None]
                request_ids = np.repeat(request_ids, counts[streaming])
                told = tokens[streaming][each]
            self._tell(request_ids, told, rest)
        for number, found in looked_at.items():
            self._tell_one(of.requests[number], found, rest)
        for request_id, text in rest.items():  # of those of which nothing was told yet
            reason = self._running[request_id].request.finish_reason
            self._give(TokenEvent(request_id, None, "".join(text), reason))

    def _look_at(
        self,
        request: Request,
        had_drafts: bool,
        new: list[int],
        described: np.ndarray | None,
    ) -> _Sampled:
        """What counts of the new tokens of a request, [W], with what is told of each [W, ...]."""
        running = self._running[request.request_id]
        error, structure, is_redone = None, running.structure, False
        if structure is not None and structure.error is not None:
            new = []
        elif new[-1] == NOT_FINITE:
            new = new[:-1]
            # That may come of a draft, whose key is in a block with those before it. The next
            # step tells, which computes the same token without any.
            is_redone = had_drafts
            if not is_redone:
                index = request.num_generated - request.has_unread
                error = f"logits are not finite at generated token {index}"
                if structure is not None and structure.ruled_out:
                    error += f", or {structure.name} allows what is ruled out"
        try:
            text, is_over = self._read(running, new)
        except ValueError as failure:  # no decoder of text should, and it is nobody else's fault
            text, is_over = [], False
            error = f"the tokens have no text: {failure}"
        if structure is not None and structure.error is not None and not text:
            error = structure.error
        is_redone &= error is None and not is_over
        found = _Sampled(new[: len(text)], text, is_over, is_redone, error)
        options = running.options
        if described is not None and options is not None and options.logprobs is not None:
            found.logprobs = [
                read_described(row, token, options.logprobs)
                for row, token in zip(described, found.tokens, strict=False)
            ]
        self.statistics.sampled_rows += bool(new)
        self.statistics.accepted_tokens += max(0, len(found.tokens) - 1)
        return found

    def _read(self, running: _Running, tokens: Sequence[int]) -> tuple[list[str], bool]:
        """The text of each token up to one that ends the request, and whether one does."""
        params, single = running.request.params, running.request.flags & SINGLE
        text: list[str] = []
        for token in tokens:
            ends = self.ends(params, token)
            if ends and not params.include_stop_str_in_output:
                return [*text, ""], True
            structure = running.structure
            if structure is not None and not ends:
                ends = structure.push(token)
                if structure.error is not None:
                    return text, False  # told with the next step, where tokens come before it
            self.statistics.generated_tokens += 1
            text.append(self._text_of(running, token))
            stopped = single and running.stream is not None and running.stream.stopped
            if ends or stopped:
                return text, True
        return text, False

    def _text_of(self, running: _Running, token: int) -> str:
        """The text that a token makes certain."""
        request = running.request
        if not request.flags & SINGLE:
            text = self._whole[token]
            if text is not None and request.request_id not in self._partial:
                return text
        if running.stream is None:
            running.stream = self._stream(request.params)
        text = running.stream.push(token)
        if not request.flags & SINGLE:
            change = self._partial.discard if running.stream.is_whole else self._partial.add
            change(request.request_id)
        return text

    def _finish(self, request: Request, new: list[int]) -> list[str]:
        """Close a request that the scheduler has ended.

        Returns:
            The text of each of the new tokens, which were not looked at yet, the last one with all
            that was not told before; that alone if there are none.
        """
        running = self._running[request.request_id]
        if request.finish_reason == "stop":
            new = new[:-1]
            last = [""]
        else:
            last = [] if new else [""]
        text = [self._text_of(running, token) for token in new] + last
        stream = running.stream if request.flags & SINGLE else None
        was_stopped = stream is not None and stream.stopped
        text[-1] += self._close(running)
        if stream is not None and stream.stopped and not was_stopped and request.error is None:
            request.finish_reason = "stop"  # a stop string in what had been held back
        return text

    def _close(self, running: _Running) -> str:
        """Have all the text of a request that has ended; returns what was not told of it."""
        request = running.request
        self._with_options.pop(request.request_id, None)
        self._structures.pop(request.request_id, None)
        if request.flags & SINGLE:
            assert running.stream is not None
            rest = running.stream.finish()
            running.text = running.stream.text
            return rest
        tokens = request.generated_token_ids
        if request.finish_reason == "stop":
            tokens.pop()
        try:
            running.text = self.tokenizer.decode(tokens)
        except ValueError as failure:
            request.finish_reason = "error"
            request.error = f"the tokens have no text: {failure}"
        was_partial = request.request_id in self._partial
        self._partial.discard(request.request_id)
        if request.flags & QUIET:
            return running.text
        if not was_partial:
            return ""
        assert running.stream is not None
        return running.stream.finish()

    def _tell(
        self, request_ids: np.ndarray, tokens: np.ndarray, rest: dict[int, list[str]]
    ) -> None:
        """Events of tokens, and their requests; takes those that end out of `rest`."""
        running, whole, partial = self._running, self._whole, self._partial
        owner, events = None, self._events.setdefault(None, [])
        for request_id, token in zip(request_ids.tolist(), tokens.tolist(), strict=True):
            one = running[request_id]
            if one.owner is not owner:
                owner, events = one.owner, self._events.setdefault(one.owner, [])
            if request_id in rest:
                text, *more = rest.pop(request_id)
                if more:
                    rest[request_id] = more
                reason = None if more else one.request.finish_reason
                events.append(TokenEvent(request_id, token, text, reason))
                continue
            known = whole[token]
            if known is None or request_id in partial:
                known = self._text_of(one, token)
            events.append(TokenEvent(request_id, token, known, None))
        if not self._events[None]:
            del self._events[None]

    def _tell_one(self, request: Request, found: _Sampled, rest: dict[int, list[str]]) -> None:
        """Events of a request that was looked at; takes it out of `rest` if it ends."""
        i = request.request_id
        if request.flags & QUIET and not request.flags & SINGLE:
            return
        logprobs: Sequence[TokenLogprobs | None] = found.logprobs or [None] * len(found.tokens)
        of_tokens = zip(found.tokens, found.text, logprobs, strict=True)
        events = [TokenEvent(i, token, t, None, known) for token, t, known in of_tokens]
        if found.error is not None:
            events.append(TokenEvent(i, None, "", None))
        if i in rest:
            whole = events[-1].text + "".join(rest.pop(i))
            reason = request.finish_reason
            events[-1] = events[-1]._replace(text=whole, finish_reason=reason)
        for event in events:
            self._give(event)

    def _give(self, event: TokenEvent) -> None:
        """Keep an event until the owner of its request asks for it."""
        assert event.request_id is not None
        owner = self._running[event.request_id].owner
        self._events.setdefault(owner, []).append(event)

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


def _is_single(params: SamplingParams, whole: bool) -> bool:
    """Whether the tokens of a request are looked at one by one.

    `whole` says whether its text can be had without that.
    """
    return not whole or bool(
        params.stop
        or params.stop_token_ids
        or params.include_stop_str_in_output
        or params.logprobs is not None
        or not params.skip_special_tokens
    )


def _checked_id(request_id: Any) -> int:
    if not isinstance(request_id, int) or isinstance(request_id, bool):
        raise ValueError(f"request id {request_id!r:.80}: expected an integer")
    return request_id

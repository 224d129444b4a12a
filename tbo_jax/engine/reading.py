"""From the tokens of a step to text and events: what the requests are told."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tbo_jax.engine.dispatch import DispatchedStep
from tbo_jax.engine.running import IGNORES_EOS, QUIET, SINGLE, Language, Running, TokenEvent
from tbo_jax.engine.scheduling.plan import SampledRows
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.statistics import EngineStatistics
from tbo_jax.sampling.draw import NOT_FINITE
from tbo_jax.sampling.logprobs import TokenLogprobs, read_described


@dataclass(slots=True)
class OneRead:
    """What a sequence that is looked at by itself got in a step, up to what ends its request."""

    tokens: list[int]
    text: list[str]  # of each token
    is_over: bool = False
    is_redone: bool = False  # the device went on from a token that does not count
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # of each token


@dataclass(slots=True)
class StepRead:
    """What the sequences of a step got, [N] as `StepPlan.sampled` has them; see `commit`."""

    of: SampledRows
    tokens: np.ndarray  # [N, W] int32
    counts: np.ndarray  # [N] int, how many of them count
    stopped: np.ndarray  # [N] bool, whether the last of these ends its request
    plain: np.ndarray  # [N] bool, of those whose requests go on, the ones that are alike
    flags: np.ndarray  # [N] int32, of their requests
    single: dict[int, OneRead] = field(default_factory=dict)  # and the others, by number

    @property
    def failed(self) -> dict[int, str]:
        """Number -> why it ends without another token."""
        return {n: found.error for n, found in self.single.items() if found.error is not None}

    @property
    def redone(self) -> list[int]:
        """The numbers of those of which fewer tokens count than the device takes."""
        return [number for number, found in self.single.items() if found.is_redone]


class Reader:
    """The unfinished requests with their texts, and the events that their owners have not got.

    Most tokens need no more than a comparison with those that end a text, and a look-up, for all of
    a step at once. The others are looked at one by one.
    """

    def __init__(self, language: Language, vocab_size: int, statistics: EngineStatistics) -> None:
        """Args:
        language: of the texts.
        vocab_size: of the model.
        statistics: that count what is read.
        """
        self.running: dict[int, Running] = {}  # by request id, until they are taken out
        self._language = language
        self._statistics = statistics
        self._ends = np.zeros(vocab_size, bool)
        self._ends[[token for token in language.end_of_sequence if token < vocab_size]] = True
        self._events: dict[Hashable, list[TokenEvent]] = {}  # by owner, not taken yet

    def has_events(self, owner: Hashable) -> bool:
        """Whether some wait for this owner."""
        return owner in self._events

    def take_events(self, owner: Hashable) -> list[TokenEvent]:
        """Those that wait for this owner."""
        return self._events.pop(owner, [])

    def drop_events(self, request_id: int) -> None:
        """Tell nothing more of a request."""
        owner = self.running[request_id].owner
        if kept := [event for event in self.take_events(owner) if event.request_id != request_id]:
            self._events[owner] = kept

    def give(self, event: TokenEvent) -> None:
        """Keep an event until the owner of its request asks for it."""
        assert event.request_id is not None
        self._events.setdefault(self.running[event.request_id].owner, []).append(event)

    def restart(self) -> None:
        """Make the texts of unfinished requests anew: they may be of tokens that do not count."""
        for one in self.running.values():
            if not one.request.is_finished:
                one.restart()

    def read(self, step: DispatchedStep, wanted: np.ndarray, flags: np.ndarray) -> StepRead:
        """Wait for a step, and find what counts of its tokens.

        Args:
            step: its requests are those here.
            wanted: [N] bool, whose tokens are wanted still.
            flags: [N] int32, of their requests.
        """
        plan, of, stats = step.plan, step.plan.sampled, self._statistics
        start = time.perf_counter()
        if step.prompts is not None:
            step.prompts.read()
        (tokens, counts), described = step.read(), step.read_described()
        stats.wait_seconds += time.perf_counter() - start
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

        found = StepRead(of, tokens, counts, stopped, plain, flags)
        for number in np.flatnonzero(wanted & single).tolist():
            one = self._read_one(
                of.requests[number],
                bool(plan.num_drafts[number]),
                tokens[number, : counts[number]].tolist(),
                None if described is None else described[number],
            )
            stopped[number], counts[number] = one.is_over, len(one.tokens)
            found.single[number] = one
        return found

    def tell(self, read: StepRead, finished: Sequence[Request]) -> None:
        """Make the events of a step.

        Args:
            read: what was read of it.
            finished: the requests that ended by it.
        """
        of = read.of
        rest: dict[int, list[str]] = {}  # of requests that end, by token that is not told yet
        for request in finished:
            (number,) = np.flatnonzero(of.request_ids == request.request_id).tolist()
            is_told = number in read.single or request.flags & QUIET
            new = [] if is_told else read.tokens[number, : read.counts[number]].tolist()
            rest[request.request_id] = self.running[request.request_id].finish(new)
        streaming = read.plain & (read.flags & QUIET == 0)
        if streaming.any():
            request_ids, tokens = of.request_ids[streaming], read.tokens[streaming]
            counts = read.counts[streaming]
            if tokens.shape[1] > 1:
                tokens = tokens[np.arange(tokens.shape[1]) < counts[:, None]]
                request_ids = np.repeat(request_ids, counts)
            self._tell(request_ids, tokens.reshape(-1), rest)
        for number, found in read.single.items():
            self._tell_one(of.requests[number], found, rest)
        for request_id, text in rest.items():  # of those of which nothing was told yet
            reason = self.running[request_id].request.finish_reason
            self.give(TokenEvent(request_id, None, "".join(text), reason))

    def _read_one(
        self, request: Request, had_drafts: bool, new: list[int], described: np.ndarray | None
    ) -> OneRead:
        """What counts of the new tokens of a request, [W], with what is told of each [W, ...]."""
        running = self.running[request.request_id]
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
            text, count, is_over = running.read(new)
        except ValueError as failure:  # no decoder of text should, and it is nobody else's fault
            text, count, is_over = [], 0, False
            error = f"the tokens have no text: {failure}"
        if structure is not None and structure.error is not None and not text:
            error = structure.error
        is_redone &= error is None and not is_over
        found = OneRead(new[: len(text)], text, is_over, is_redone, error)
        options = running.options
        if described is not None and options is not None and options.logprobs is not None:
            found.logprobs = [
                read_described(row, token, options.logprobs)
                for row, token in zip(described, found.tokens, strict=False)
            ]
        self._statistics.generated_tokens += count
        self._statistics.sampled_rows += bool(new)
        self._statistics.accepted_tokens += max(0, len(found.tokens) - 1)
        return found

    def _tell(
        self, request_ids: np.ndarray, tokens: np.ndarray, rest: dict[int, list[str]]
    ) -> None:
        """Events of tokens, and their requests; takes those that end out of `rest`."""
        running, whole = self.running, self._language.whole
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
            known = None if one.is_partial else whole[token]
            if known is None:
                known = one.text_of(token)
            events.append(TokenEvent(request_id, token, known, None))
        if not self._events[None]:
            del self._events[None]

    def _tell_one(self, request: Request, found: OneRead, rest: dict[int, list[str]]) -> None:
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
            self.give(event)

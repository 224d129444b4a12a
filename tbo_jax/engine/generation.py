"""From a prompt to its completion: what is asked for, and the requests that an engine runs for it.

`LLM` and `AsyncLLM` both use it.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, cast

from tbo_jax.engine.engine import Engine
from tbo_jax.engine.running import TokenEvent
from tbo_jax.engine.scheduling.request import FinishReason, checked_priority
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.sampling.params import MAX_SEED, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt gave."""

    prompt: Prompt
    prompt_token_ids: list[int]  # none if it could not be run
    token_ids: list[int]  # generated, without the token that ended it
    text: str
    finish_reason: FinishReason  # with "abort" and "error" the tokens and text are those until then
    error: str | None = None  # with "error", why
    num_cached_tokens: int = 0  # of the prompt, whose keys and values were there already
    logprobs: list[TokenLogprobs] | None = None  # of each of `token_ids`, where asked for
    others: tuple[Completion, ...] = ()  # with `n` above 1: the second completion, the third, ...
    # Of each of `prompt_token_ids`, where asked for; None of the first.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """How probable a text is: of each token but the first, given those before it."""

    token_ids: list[int]
    logprobs: list[float]  # natural logarithms, of `token_ids[1:]`

    @property
    def total(self) -> float:
        """Their sum, the logarithm of the probability of all that follows the first token."""
        return math.fsum(self.logprobs)

    @property
    def count(self) -> int:
        """How many there are; exp(-total / count) is the perplexity."""
        return len(self.logprobs)

    @classmethod
    def of(cls, name: str, completion: Completion) -> Self:
        """That of a prompt whose log-probabilities were asked for.

        Raises:
            RuntimeError: it begins with the name, and says why they are not there or not finite.
        """
        known = completion.prompt_logprobs or []
        logprobs = [of_token.logprob for of_token in known if of_token is not None]
        error = completion.error
        if error is None and len(known) < len(completion.prompt_token_ids):
            error = "it was aborted"
        if error is None and not all(map(math.isfinite, logprobs)):
            error = "the log-probabilities are not finite"
        if error is not None:
            raise RuntimeError(f"{name}: {error}")
        return cls(completion.prompt_token_ids, logprobs)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and what is to be done with it."""

    prompt: Prompt
    token_ids: list[int]
    error: str | None  # why it has no token ids
    params: SamplingParams  # with a seed
    salt: str
    priority: int = 0

    @classmethod
    def read(
        cls,
        prompt: Prompt,
        params: SamplingParams,
        salt: str,
        encode: Callable[[Prompt], list[int]],
        priority: int = 0,
    ) -> Self:
        """Make token ids of a prompt, and draw a seed if none is given.

        Args:
            prompt: one that can be read only once is kept as a list.
            params: what is asked for.
            salt: only requests of the same one share pages.
            encode: gives the token ids, or a ValueError, which is kept as the `error`.
            priority: the lower, the earlier its turn.

        Raises:
            ValueError: `params` are no `SamplingParams`, `salt` is no text, or `priority` no
                integer.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        if not isinstance(salt, str):
            raise ValueError(f"cache_salt is {salt!r:.80}: expected a text")
        priority = checked_priority(priority)
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        if isinstance(prompt, Iterator):
            prompt = cast(Prompt, list(prompt))
        try:
            return cls(prompt, encode(prompt), None, params, salt, priority)
        except ValueError as error:
            return cls(prompt, [], str(error), params, salt, priority)

    def of_samples(self) -> list[SamplingParams]:
        """The params of each of the `n` completions, whose seeds count up as vLLM's do.

        The first asks for the log-probabilities of the prompt, for all of them.
        """
        if self.params.n == 1:
            return [self.params]
        seed = self.params.seed
        assert seed is not None
        first, *others = [
            replace(self.params, n=1, seed=(seed + sample) % (MAX_SEED + 1))
            for sample in range(self.params.n)
        ]
        return [first, *(replace(params, prompt_logprobs=None) for params in others)]


@dataclass(slots=True)
class _Sample:
    """A completion under way: which of the `n`, and its log-probabilities so far."""

    number: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Generation:
    """A prompt's requests in an engine, one for each of its `n` completions."""

    def __init__(
        self, engine: Engine, asked: Asked, owner: Hashable, tells_tokens: bool = True
    ) -> None:
        """Add them to the engine.

        Args:
            engine: runs them.
            asked: what is to be run.
            owner: whose `step` returns their events.
            tells_tokens: whether somebody wants an event for each token.

        Raises:
            ValueError: the prompt has no token ids, or the engine refuses it (`Engine.add`); then
                no request was added.
        """
        if asked.error is not None:
            raise ValueError(asked.error)
        self._engine = engine
        self._prompt = asked.prompt
        self._running: dict[int, _Sample] = {}  # by request id
        self._done: dict[int, Completion] = {}  # by number
        try:
            for number, params in enumerate(asked.of_samples()):
                request_id = engine.add(
                    asked.token_ids, params, owner, asked.salt, tells_tokens, asked.priority
                )
                self._running[request_id] = _Sample(number)
        except BaseException:
            self.drop()
            raise

    @property
    def request_ids(self) -> list[int]:
        """The ids of its unfinished requests."""
        return list(self._running)

    @property
    def is_over(self) -> bool:
        """Whether all its requests have ended."""
        return not self._running

    @property
    def completion(self) -> Completion:
        """What it gave, once it is over."""
        first, *others = (self._done[number] for number in sorted(self._done))
        known = first.prompt_logprobs
        others = [replace(other, prompt_logprobs=known) for other in others]
        return replace(first, others=tuple(others)) if others else first

    def take(self, event: TokenEvent) -> TokenEvent:
        """Book an event of one of its unfinished requests; a last one takes the request out.

        Returns:
            The event, as one of its sample.

        Raises:
            ValueError: the request was taken out of the engine already.
        """
        assert event.request_id is not None
        sample = self._running[event.request_id]
        if event.logprobs is not None:
            sample.logprobs.append(event.logprobs)
        if event.finish_reason is not None:
            self._done[sample.number] = self._complete(event.request_id, sample)
            del self._running[event.request_id]
        return event._replace(sample=sample.number) if sample.number else event

    def check_held(self) -> None:
        """RuntimeError if somebody took a request out of the engine: it would give no more events.

        Look for events before.
        """
        if gone := [i for i in self._running if not self._engine.holds(i)]:
            raise RuntimeError(f"requests {gone} were taken out of the engine")

    def drop(self) -> None:
        """Take its unfinished requests out of the engine, and leave nothing of them there."""
        for request_id in self._running:
            self._engine.abort(request_id)
            with contextlib.suppress(ValueError):  # it is gone already
                self._engine.pop(request_id)
        self._running.clear()

    def _complete(self, request_id: int, sample: _Sample) -> Completion:
        request, text = self._engine.pop(request_id)
        tokens, params = request.generated_token_ids, request.params
        if tokens and self._engine.leaves_out(params, tokens[-1]):
            tokens = tokens[:-1]
        assert request.finish_reason is not None
        logprobs = None if params.logprobs is None else sample.logprobs[: len(tokens)]
        of_prompt = request.prompt_logprobs
        return Completion(
            self._prompt,
            list(request.prompt_token_ids),
            tokens,
            text,
            request.finish_reason,
            request.error,
            request.num_cached,
            logprobs,
            prompt_logprobs=None if of_prompt is None else of_prompt.read(),
        )

"""What the API asks of an engine, wherever that runs: in this process or in another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tbo_jax.engine.scheduling.request import FinishReason
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tbo_jax.engine.llm import LLM


class Generate(msgspec.Struct, frozen=True):
    """A prompt to run."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # with a seed, so that it can be run again with the same result
    cache_salt: str = ""
    priority: int = 0
    tells_tokens: bool = True  # an update for each token; otherwise one at the end is enough


class Update(msgspec.Struct):
    """What came of a prompt since the last update; of one of its `n` samples."""

    sample: int = 0
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None  # of each of `token_ids`, where asked for
    finish_reason: FinishReason | None = None  # in the last one of the sample
    error: str | None = None  # with "error", why
    num_cached_tokens: int = 0  # in the last one: of the prompt, those that were there already
    # In the last one of sample 0, where asked for: of each token of the prompt, None of the first.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def join(self, later: Update) -> None:
        """Go on with what came later of the same sample."""
        join(self, later)


class Piece(Protocol):
    """What `Update` and the message that carries it between processes have in common."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    error: str | None
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None


def join(known: Piece, later: Piece) -> None:
    """Go on with what came later of the same completion; `later` may be used no more."""
    known.token_ids += later.token_ids
    known.text += later.text
    if known.logprobs is None:
        known.logprobs = later.logprobs
    else:
        known.logprobs += later.logprobs or ()
    known.finish_reason, known.error = later.finish_reason, later.error
    known.num_cached_tokens = later.num_cached_tokens
    known.prompt_logprobs = later.prompt_logprobs


class ModelInfo(msgspec.Struct, frozen=True):
    """What the API needs to know of the model that an engine runs."""

    folder: str  # of the checkpoint: tokenizer, chat template, generation_config.json
    max_context: int  # most tokens of a request, prompt and generated together
    vocab_size: int
    max_logprobs: int | None  # most that a request may ask for; None: no options at all
    takes_prompt_logprobs: bool

    @classmethod
    def of(cls, llm: LLM) -> ModelInfo:
        """That of a model which is loaded."""
        engine = llm.engine
        return cls(
            folder=str(llm.folder),
            max_context=engine.max_context,
            vocab_size=engine.runner.config.vocab_size,
            max_logprobs=engine.max_logprobs,
            takes_prompt_logprobs=engine.max_prompt_logprobs is not None,
        )


class EngineClient(Protocol):
    """An engine for the tasks of one event loop."""

    @property
    def info(self) -> ModelInfo:
        """Of the model it runs; known once it is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now. One that starts anew does not, and loses none."""

    def generate(self, request: Generate) -> AsyncIterator[Update]:
        """Run a prompt. Leaving the iteration early ends the request within a step.

        Raises:
            ValueError: the engine refuses the prompt or what its params ask for.
            RuntimeError: it was given up (the engine is gone for good, or fails on it).
        """

    async def statistics(self) -> dict[str, Any]:
        """Counts and times of the engine (`EngineStatistics`, the scheduler's, what runs now)."""

    async def close(self, *, seconds: float = 0.0) -> None:
        """Take no more requests; end those under way after so many seconds at the latest."""

"""One request of an engine, and its text: how its tokens become text, and where it ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tbo_jax.engine.request_options import RequestOptions
from tbo_jax.engine.scheduling.request import FinishReason, Request
from tbo_jax.engine.structured.structure import Structure
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import TextStream, Tokenizer, WholeTokens

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


class Language:
    """What the texts of all requests have in common: the tokenizer, and the ids that end them."""

    def __init__(self, tokenizer: Tokenizer, end_of_sequence: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.end_of_sequence = end_of_sequence
        self.whole = WholeTokens(tokenizer)

    def ends(self, params: SamplingParams, token: int) -> bool:
        """Whether a token ends a request: an end of sequence, or one of its own."""
        return token in params.stop_token_ids or (
            token in self.end_of_sequence and not params.ignore_eos
        )

    def stream(self, params: SamplingParams) -> TextStream:
        """The text of a request from its beginning."""
        return TextStream(
            self.tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    def flags(self, params: SamplingParams, *, stream: bool) -> int:
        """Those of a request; `stream` says whether somebody wants its tokens before it ends."""
        single = bool(
            (stream and not self.whole.any)
            or params.stop
            or params.stop_token_ids
            or params.include_stop_str_in_output
            or params.logprobs is not None
            or not params.skip_special_tokens
            or params.structure is not None
        )
        return IGNORES_EOS * params.ignore_eos | QUIET * (not stream) | SINGLE * single


@dataclass(slots=True, eq=False)
class Running:
    """What an engine keeps of a request beside the scheduler's part.

    Its tokens become text in one of three ways. Those of a request with the flag SINGLE go through
    a stream, which holds back what may become a stop string. Others are looked up, as most are
    whole characters; for those that are not there is a stream too, from the first of them on. Where
    nobody wants tokens, the text is made at the end.
    """

    request: Request
    language: Language
    owner: Hashable
    options: RequestOptions | None
    structure: Structure | None
    stream: TextStream | None = None
    is_partial: bool = False  # the text ends amid a character, of one that is not SINGLE
    text: str = ""  # when it has ended

    def __post_init__(self) -> None:
        if self.request.flags & SINGLE:
            self.stream = self.language.stream(self.request.params)

    def restart(self) -> None:
        """Make text and structure anew of the tokens so far."""
        request = self.request
        self.stream = self.language.stream(request.params)
        for token in request.generated_token_ids:
            self.stream.push(token)
        if self.structure is not None:
            self.structure.restart(request.generated_token_ids)
        self.is_partial = not request.flags & SINGLE and not self.stream.is_whole

    def check_goes_on(self, most: int) -> None:
        """Check a new request whose first tokens another engine has generated.

        Args:
            most: how many tokens it may generate.

        Raises:
            ValueError: it ends with these tokens, or before.
        """
        tokens = self.request.generated_token_ids
        self.restart()
        structure = self.structure
        if structure is not None and structure.error is not None:
            raise ValueError(f"generated: {structure.error}")
        assert self.stream is not None
        complete = structure is not None and structure.matcher.is_stopped()
        ended = any(self.language.ends(self.request.params, token) for token in tokens)
        if ended or complete or self.stream.stopped or len(tokens) >= most:
            raise ValueError(
                f"generated has {len(tokens)} tokens, and the request ends with them or before: "
                "expected tokens that it goes on after"
            )

    def text_of(self, token: int) -> str:
        """The text that a token makes certain."""
        single = self.request.flags & SINGLE
        if not single and not self.is_partial:
            text = self.language.whole[token]
            if text is not None:
                return text
        if self.stream is None:
            self.stream = self.language.stream(self.request.params)
        text = self.stream.push(token)
        self.is_partial = not single and not self.stream.is_whole
        return text

    def read(self, tokens: Sequence[int]) -> tuple[list[str], int, bool]:
        """Go on by tokens, up to one that ends the request.

        Returns:
            The text of each of them that counts, how many are no end of the text, and whether the
            request ends. A structure that cannot follow has its `error`, which is told with the
            next step where tokens come before it.

        Raises:
            ValueError: they have no text.
        """
        params, structure = self.request.params, self.structure
        text: list[str] = []
        for token in tokens:
            ends = self.language.ends(params, token)
            if ends and not params.include_stop_str_in_output:
                return [*text, ""], len(text), True
            if structure is not None and not ends:
                ends = structure.push(token)
                if structure.error is not None:
                    break
            text.append(self.text_of(token))
            if ends or self.is_stopped:
                return text, len(text), True
        return text, len(text), False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come."""
        single = self.request.flags & SINGLE
        return bool(single) and self.stream is not None and self.stream.stopped

    def finish(self, new: Sequence[int]) -> list[str]:
        """Close a request that the scheduler has ended.

        Args:
            new: its last tokens, where they were not read.

        Returns:
            The text of each of these, the last one with all that was not told before; that alone if
            there are none.
        """
        request = self.request
        if request.finish_reason == "stop" and new:
            text = [*map(self.text_of, new[:-1]), ""]
        else:
            text = list(map(self.text_of, new)) or [""]
        was_stopped = self.is_stopped
        text[-1] += self.close()
        if self.is_stopped and not was_stopped and request.error is None:
            request.finish_reason = "stop"  # a stop string in what had been held back
        return text

    def close(self) -> str:
        """Have all the text of a request that has ended; returns what was not told of it."""
        request = self.request
        if request.flags & SINGLE:
            assert self.stream is not None
            rest = self.stream.finish()
            self.text = self.stream.text
            return rest
        tokens = request.generated_token_ids
        if request.finish_reason == "stop":
            tokens.pop()
        try:
            self.text = self.language.tokenizer.decode(tokens)
        except ValueError as failure:
            request.finish_reason = "error"
            request.error = f"the tokens have no text: {failure}"
        if request.flags & QUIET:
            return self.text
        if not self.is_partial:
            return ""
        assert self.stream is not None
        return self.stream.finish()

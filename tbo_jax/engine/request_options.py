"""What a request's options mean for a model and an engine, or why they cannot be had."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tbo_jax.sampling.options import MAX_WORDS
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.sampling.structure import STRUCTURES
from tbo_jax.text import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request that need more than the sampler.

    Attributes:
        only: nothing but what `bias` names is generated.
        bias: token id -> what is added to its logit; -inf rules it out.
        ends: ids that are ruled out before the request has its least number of tokens.
        words: ids of words of several tokens that are not generated.
        counts: the request's tokens count, those of its prompt and the generated ones.
        logprobs: how many of the most probable tokens are told with each token; None: nothing is.
    """

    only: bool
    bias: tuple[tuple[int, float], ...]
    ends: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    counts: bool
    logprobs: int | None

    @property
    def needs_row(self) -> bool:
        """Whether it has a row in the tables on the device."""
        return self.only or self.counts or bool(self.bias or self.ends)

    @property
    def changes_logits(self) -> bool:
        """Whether its logits are others for it."""
        return self.needs_row or bool(self.words)


def request_options(
    params: SamplingParams,
    tokenizer: Tokenizer,
    end_of_sequence: Collection[int],
    vocabulary: int,
    max_logprobs: int | None,
) -> RequestOptions | None:
    """The options of a request; None if it asks for none.

    Args:
        params: of the request.
        tokenizer: for `bad_words`.
        end_of_sequence: ids that end a generation.
        vocabulary: of the model.
        max_logprobs: most that a request may ask for; None: the engine has none of these options.

    Raises:
        ValueError: an id outside the vocabulary, a word that has no tokens, more of either than
            there is room for, options that leave no token, or that the engine does not have.
    """
    bias, allowed = dict(params.logit_bias), params.allowed_token_ids
    for field, ids in {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": allowed or (),
        "logit_bias": bias,
    }.items():
        for token in ids:
            if token >= vocabulary:
                raise ValueError(
                    f"SamplingParams.{field} has id {token}: expected ids of the vocabulary of "
                    f"{vocabulary}"
                )
    ends = {i for i in end_of_sequence if i < vocabulary} | set(params.stop_token_ids)
    # With a structure its masks see to it: the text may have nothing but its end left.
    ends = ends if params.min_tokens and params.structure is None else set()
    words = list(_words(params.bad_words, tokenizer, vocabulary))
    longer = tuple(sorted({word for word in words if len(word) > 1}))
    if len(longer) > MAX_WORDS:
        raise ValueError(
            f"SamplingParams.bad_words has {len(longer)} forms of several tokens: expected at most "
            f"{MAX_WORDS}"
        )
    banned = {word[0] for word in words if len(word) == 1}
    # Of all tokens only their number: this runs for each request.
    if not (vocabulary - len(banned | ends) if allowed is None else {*allowed} - banned - ends):
        raise ValueError(
            "allowed_token_ids, bad_words and min_tokens of SamplingParams rule out every token: "
            "expected one that is left"
        )
    if allowed is None:
        bias |= dict.fromkeys(banned, -math.inf)
    else:
        bias = {token: bias.get(token, 0.0) for token in allowed if token not in banned}
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    options = RequestOptions(
        only=allowed is not None,
        bias=tuple(sorted(bias.items())),
        ends=tuple(sorted(ends)),
        words=longer,
        counts=penalties != (1.0, 0.0, 0.0),
        logprobs=params.logprobs,
    )
    plain = not options.changes_logits and options.logprobs is None
    if plain and params.structure is None:
        return None
    if max_logprobs is None:
        raise ValueError(
            f"SamplingParams.{_first_option(params)} was given to an engine with "
            "request_options=False: expected none of the options that need it"
        )
    if options.logprobs is not None and options.logprobs > max_logprobs:
        raise ValueError(
            f"SamplingParams.logprobs is {options.logprobs}: expected at most max_logprobs of the "
            f"engine, {max_logprobs}"
        )
    return None if plain else options


def check_prompt_logprobs(params: SamplingParams, most: int | None) -> None:
    """ValueError if a request asks for more log-probabilities of its prompt than `most`.

    None: the engine gives none of them.
    """
    wanted = params.prompt_logprobs
    if wanted is None:
        return
    if most is None:
        raise ValueError(
            f"SamplingParams.prompt_logprobs is {wanted}: expected None, or an engine with "
            "prompt_logprobs=True"
        )
    if wanted > most:
        raise ValueError(
            f"SamplingParams.prompt_logprobs is {wanted}: expected at most max_logprobs of the "
            f"engine, {most}"
        )


def _first_option(params: SamplingParams) -> str:
    names = (
        "logprobs", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "min_tokens", *STRUCTURES,
    )  # fmt: skip
    plain = SamplingParams()
    return next(name for name in names if getattr(params, name) != getattr(plain, name))


def _words(
    words: Sequence[str], tokenizer: Tokenizer, vocabulary: int
) -> Iterator[tuple[int, ...]]:
    """The ids of each word as vLLM takes it: without a space before, and perhaps with one."""
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not bare or max(bare) >= vocabulary:
            raise ValueError(
                f"SamplingParams.bad_words has {word!r:.80}, whose ids are {list(bare)}: expected "
                f"one or more of the vocabulary of {vocabulary}"
            )
        yield bare
        if len(spaced) == len(bare) and spaced[0] != bare[0] and max(spaced) < vocabulary:
            yield spaced

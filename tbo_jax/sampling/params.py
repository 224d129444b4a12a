"""What a caller asks of one request's decoding. Host side only: importing this never loads JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np

from tbo_jax.sampling.structure import STRUCTURES, checked_text, schema_text

MAX_SEED = 2**63 - 1
_MAX_NEW_TOKENS = 128
_MOST_ID = 2**31 - 1
_MOST_REPETITION = 1e30  # and its inverse: a logit of 1e8 stays finite in float32
_LARGEST = float(np.finfo(np.float32).max)


def _refuse(field: str, value: object, expected: str) -> ValueError:
    return ValueError(f"SamplingParams.{field} is {value!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to decode one request.

    The logits are changed in the order of vLLM: `allowed_token_ids`, `bad_words`, `min_tokens`,
    `logit_bias`, then `repetition_penalty`, `frequency_penalty` and `presence_penalty`. The filters
    follow: temperature, then top-k, then top-p over what top-k left (renormalised), then min-p
    relative to the most probable token.

    `json_schema`, `json_object`, `regex`, `grammar` and `choice` say which texts are allowed, as in
    vLLM's `structured_outputs` (where the first is `json`). A request has one of them at most. Its
    end-of-sequence tokens are allowed where the text may end; where nothing may follow it ends
    without one. A text that `max_new_tokens`, a stop string or a token of `stop_token_ids` cuts is
    the beginning of an allowed one.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1. `max_tokens`, as vLLM calls it, is
            taken in its place.
        temperature: the logits are divided by it; 0 is greedy decoding, which ignores the filters.
        top_k: keep the k most probable tokens; 0 is off, and so is -1, as in vLLM.
        top_p: keep the fewest most probable tokens whose mass reaches it, in (0, 1]; 1 is off.
        min_p: drop tokens less probable than this fraction of the best one's, in [0, 1]; 0 is off.
        seed: with temperature > 0, the same seed gives the same tokens in any batch: exactly in
            float32, and up to rounding in bfloat16, where steps of other shapes round otherwise and
            a token that was nearly another one may become it. None lets the engine draw a seed.
        stop: texts that end the generation. One string is taken as a tuple of one.
        ignore_eos: go on after an end-of-sequence token.
        n: completions of the prompt, as vLLM's: number k draws with seed + k.
        logprobs: with each token its log-probability, its rank, and the most probable tokens, so
            many, with theirs. They are log_softmax of the logits of the model, before any option
            here changes them (vLLM's `raw_logprobs`). 0: of the token alone; None: off.
        prompt_logprobs: the same of the tokens of the prompt, each given those before it; None for
            the first (vLLM). The engine must have been made for it.
        repetition_penalty: the logit of each token of the prompt or the text so far is divided by
            it if it is above 0, else multiplied (transformers' `RepetitionPenaltyLogitsProcessor`;
            vLLM's is the same). From 1e-30 to 1e30; 1 is off.
        frequency_penalty: is taken off a token's logit for each time that it was generated (vLLM,
            OpenAI), in [-2, 2]; 0 is off.
        presence_penalty: is taken off the logit of each token that was generated (vLLM, OpenAI), in
            [-2, 2]; 0 is off.
        logit_bias: token id -> what is added to its logit, finite (vLLM, OpenAI). Kept as pairs.
        allowed_token_ids: nothing but these is generated (vLLM); None: no limit.
        bad_words: texts whose tokens are not generated in a row (vLLM): the last token of a word is
            ruled out where the text ends with the others. A word is taken as it is, and with a
            space before it where that gives as many tokens and another first one.
        min_tokens: so many tokens come before an end-of-sequence token or one of `stop_token_ids`
            can (vLLM; transformers' `min_new_tokens`); stop strings that end before are not seen. A
            text after which nothing is allowed ends all the same.
        stop_token_ids: ids that end the generation as an end-of-sequence token does (vLLM).
        include_stop_str_in_output: the text keeps the stop string that ended it, and the token ids
            the token that did, with its text (vLLM).
        skip_special_tokens: special tokens have no text (transformers, vLLM).
        json_schema: the text is JSON that this schema allows, with properties in the order of the
            schema; a dict or JSON text, kept as text. It may have what llguidance supports of JSON
            Schema (docs/json_schema.md there), and "x-guidance" for the spaces.
        json_object: the text is any JSON object (OpenAI's `response_format` of type json_object).
        regex: the whole text matches it; in the syntax of Rust's regex, without look-around.
        grammar: the text is of this context-free grammar, in llguidance's form of Lark
            (docs/syntax.md there) or in llama.cpp's GBNF.
        choice: the text is one of these.

    Raises:
        ValueError: a value of the wrong type or out of range; names field, value and range.
    """

    max_new_tokens: int = _MAX_NEW_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    json_schema: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            max_tokens = _whole("max_tokens", max_tokens, 1, None)
            if self.max_new_tokens not in (_MAX_NEW_TOKENS, max_tokens):
                raise _refuse("max_tokens", max_tokens, "it or max_new_tokens, which mean the same")
            self._set("max_new_tokens", max_tokens)
        self._set_int("max_new_tokens", 1, None)
        self._set_int("top_k", -1, None)
        self._set("top_k", max(self.top_k, 0))
        self._set_int("n", 1, None)
        self._set_int("min_tokens", 0, None)
        if self.min_tokens > self.max_new_tokens:
            most = f"at most max_new_tokens, {self.max_new_tokens}"
            raise _refuse("min_tokens", self.min_tokens, most)
        if self.seed is not None:
            self._set_int("seed", 0, MAX_SEED)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                self._set_int(field, 0, None)
        self._set_float("temperature", 0.0, math.inf, "a finite number, 0 or more")
        expected = "a number in (0, 1]"
        self._set_float("top_p", 0.0, 1.0, expected)
        if self.top_p == 0.0:
            raise _refuse("top_p", self.top_p, expected)
        low, high = 1 / _MOST_REPETITION, _MOST_REPETITION
        expected = f"a number from {low:g} to {high:g}"
        self._set_float("repetition_penalty", low, high, expected)
        self._set_float("min_p", 0.0, 1.0, "a number in [0, 1]")
        for field in ("frequency_penalty", "presence_penalty"):
            self._set_float(field, -2.0, 2.0, "a number in [-2, 2]")
        flags = "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "json_object"
        for field in flags:
            if not isinstance(getattr(self, field), bool):
                raise _refuse(field, getattr(self, field), "True or False")
        for field in ("stop", "bad_words"):
            self._set_texts(field)
        self._set_ids("stop_token_ids")
        if (allowed := self.allowed_token_ids) is not None:
            self._set_ids("allowed_token_ids")
            if not self.allowed_token_ids:
                raise _refuse("allowed_token_ids", allowed, "one id or more, or None")
        self._set_bias()
        self._set_structure()

    @property
    def structure(self) -> tuple[str, Any] | None:
        """The option that says which texts are allowed, and its value; None: all are."""
        return next(self._structures(), None)

    def _structures(self) -> Iterator[tuple[str, Any]]:
        for name in STRUCTURES:
            value = getattr(self, name)
            if value is not (False if name == "json_object" else None):
                yield name, value

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen once this is over

    def _set_int(self, field: str, low: int, high: int | None) -> None:
        self._set(field, _whole(field, getattr(self, field), low, high))

    def _set_float(self, field: str, low: float, high: float, expected: str) -> None:
        value = getattr(self, field)
        if not _is_real(value):
            raise _refuse(field, value, expected)
        try:
            number = float(value)
        except OverflowError:
            raise _refuse(field, value, expected) from None
        if not (math.isfinite(number) and low <= number <= high):
            raise _refuse(field, value, expected)
        self._set(field, number)

    def _set_texts(self, field: str) -> None:
        expected = "a non-empty string, or a list or tuple of them"
        value = getattr(self, field)
        if isinstance(value, str):
            texts: tuple[Any, ...] = (value,)
        elif isinstance(value, list | tuple):
            texts = tuple(value)
        else:
            raise _refuse(field, value, expected)
        if not all(isinstance(text, str) and text for text in texts):
            raise _refuse(field, value, expected)
        self._set(field, texts)

    def _set_ids(self, field: str) -> None:
        """Token ids, each once, in ascending order."""
        value = getattr(self, field)
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise _refuse(field, value, "a list of token ids")
        self._set(field, tuple(sorted({_whole(field, i, 0, _MOST_ID) for i in value})))

    def _set_bias(self) -> None:
        value = self.logit_bias
        expected = "a mapping from token ids to finite numbers"
        try:
            bias = dict(value)
        except (TypeError, ValueError):
            raise _refuse("logit_bias", value, expected) from None
        for number in bias.values():
            if not _is_real(number) or not abs(number) <= _LARGEST:  # NaN is not
                raise _refuse("logit_bias", value, expected)
        ids = {_whole("logit_bias", i, 0, _MOST_ID): float(number) for i, number in bias.items()}
        self._set("logit_bias", tuple(sorted(ids.items())))

    def _set_structure(self) -> None:
        given = [name for name, _ in self._structures()]
        if not given:
            return
        name, value = given[0], getattr(self, given[0])
        if len(given) > 1:
            raise _refuse(name, value, f"one of {', '.join(given)}, which exclude each other")
        if self.ignore_eos:
            raise _refuse("ignore_eos", True, f"False with {name}, which says where the text ends")
        what = f"SamplingParams.{name}"
        if name == "json_schema":
            self._set(name, schema_text(value, what))
        elif name == "choice":
            self._set_texts(name)
            if not self.choice:
                raise _refuse(name, value, "one text or more, or None")
            for text in self.choice:
                checked_text(text, what)
        elif name != "json_object":
            checked_text(value, what)


def _whole(field: str, value: Any, low: int, high: int | None) -> int:
    integral = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integral or value < low or (high is not None and value > high):
        limits = f"{low} or more" if high is None else f"from {low} to {high}"
        raise _refuse(field, value, f"an integer, {limits}")
    return int(value)


def _is_real(value: Any) -> bool:
    real = isinstance(value, int | float | np.integer | np.floating)
    return real and not isinstance(value, bool)

"""Compiles what requests ask for into grammars, and keeps those that were asked for last."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from tbo_jax.engine.structured.structure import Grammar, Structure
from tbo_jax.engine.structured.vocabulary import GrammarVocabulary
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import Tokenizer, TokenizerError

MOST_KEPT = 64  # grammars; each keeps what it found out about its texts, usually below 1 MB

logger = logging.getLogger(__name__)


class Grammars:
    """Makes the `Structure` of each request. May be called from several threads.

    The vocabulary is prepared for the first request that needs it, in about a second for 150,000
    tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_of_sequence: Collection[int], vocabulary: int
    ) -> None:
        """Args:
        tokenizer: of the model.
        end_of_sequence: ids that end a generation.
        vocabulary: of the model.
        """
        self._sources = tokenizer, end_of_sequence, vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: OrderedDict[tuple[str, bool], Grammar] = OrderedDict()
        self._preparing = threading.Lock()
        self._lock = threading.Lock()  # of `_compiled`, and not held while anything is compiled

    def structure(self, params: SamplingParams) -> Structure | None:
        """The structure of a new request; None if any text will do.

        Raises:
            ValueError: the grammar is wrong, or has what llguidance does not support, or the bytes
                of the tokenizer's tokens are not known; names the option.
        """
        if params.structure is None:
            return None
        name, value = params.structure
        vocabulary = self._prepared(name)
        lark = _lark(name, value)
        # That could be the one token that is forced.
        ruled_out = params.allowed_token_ids is not None or bool(params.bad_words)
        forces = vocabulary.forces and not ruled_out
        return Structure(
            name,
            self._compile(name, lark, vocabulary, forces),
            vocabulary,
            {*vocabulary.ends, *params.stop_token_ids},
            params.min_tokens,
            name != "grammar" or not _KEEPS_TOKENS.search(lark),
            ruled_out,
        )

    def _prepared(self, name: str) -> GrammarVocabulary:
        with self._preparing:
            if self._vocabulary is None:
                try:
                    self._vocabulary = GrammarVocabulary(*self._sources)
                except TokenizerError as error:
                    raise ValueError(f"SamplingParams.{name} cannot be had: {error}") from error
            return self._vocabulary

    def _compile(
        self, name: str, lark: str, vocabulary: GrammarVocabulary, forces: bool
    ) -> Grammar:
        with self._lock:
            known = self._compiled.get((lark, forces))
            if known is not None and not known.failed:
                self._compiled.move_to_end((lark, forces))
                return known
        # At the end, so that errors name the lines of what was given.
        source = {"lark_grammar": lark if forces else f"{lark}\n{_NOT_FORCED}"}
        matcher = LLMatcher(
            vocabulary.tokenizer,
            json.dumps({"grammars": [source]}),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),
        )
        if error := matcher.get_error() or _error_of_first_token(matcher):
            raise ValueError(f"SamplingParams.{name} cannot be used: {_reason(name, error)}")
        for warning in matcher.get_grammar_warnings():
            logger.warning("SamplingParams.%s: %s", name, warning)
        grammar = Grammar(matcher)
        with self._lock:
            self._compiled[lark, forces] = grammar
            self._compiled.move_to_end((lark, forces))
            while len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return grammar


def _error_of_first_token(matcher: LLMatcher) -> str:
    """Why a grammar comes to a limit of llguidance with its first token, as (a{1000}){1000} does.

    It refuses the request then, and takes the half second that it costs from no step. That no token
    has the text that may follow is no such error: a request says so when it runs.
    """
    for _ in range(2):  # it is told to the matcher that comes next
        following = matcher.deep_copy()
        following.compute_logit_bias()  # unlike `compute_bitmask` it tells of errors
        error = following.get_error()
        if error and not error.startswith("NoExtensionBias"):
            return error
    return ""


_NOT_FORCED = '%llguidance {"no_forcing": true}'
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# After these llguidance takes no token back.
_KEEPS_TOKENS = re.compile(r"\b(max_tokens|stop)\s*=")
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")


def _lark(name: str, value: Any) -> str:
    """The option as a grammar of llguidance's Lark."""
    if name == "json_schema":
        return f"start: %json {value}"
    if name == "json_object":
        return 'start: %json {"type": "object"}'
    if name == "regex":
        return f"start: /{regex_to_lark(value, '')}/"
    if name == "choice":
        return f"start: /{regex_to_lark('|'.join(map(re.escape, value)), '')}/"
    lark = str(value)
    if _GBNF.search(lark):
        try:
            lark = gbnf_to_lark(lark)
        except Exception as error:  # it raises plain ones
            raise ValueError(
                f"SamplingParams.{name} cannot be used: {error}; expected GBNF, as it has '::='"
            ) from error
    if _TEMPERATURE.search(lark):
        raise ValueError(
            f"SamplingParams.{name} has a rule with a temperature of its own: expected none; that "
            "of SamplingParams holds for the whole text"
        )
    return lark


def _reason(name: str, error: str) -> str:
    """llguidance's words, without the text of a grammar that the caller did not write."""
    if name == "grammar":
        return error.strip()
    shown = error.partition("\n   1 | ")[0].removesuffix("\n<non-verbose/>")
    return shown.removeprefix("at 1(8): ").strip()

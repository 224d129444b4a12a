"""Incremental detokenisation: text as tokens arrive, equal in sum to decoding them all at once.

Decoding a prefix of the tokens need not give a prefix of the text, so text is emitted only when no
continuation can change it. What can change it depends on the tokenizer's decoder:

* Byte-level decoders join bytes and replace what is not UTF-8 by U+FFFD. Only bytes at the end that
  begin a character may still become one.
* Byte fallback (SentencePiece) replaces every byte of a run of byte tokens by U+FFFD when the run
  as a whole is not UTF-8, so a run is final only when a token of another kind has followed it.
* Other decoders map token by token, with an exception for the first one.

A byte-level decoder needs no call of the library: the bytes of each id are known, and Python's own
UTF-8 decoder keeps an unfinished character (0.7 us a token instead of 10, a core of an AMD EPYC).

With other decoders text is decoded from a short window: tokens whose text is out already, as
context, and the tokens after them. This is the two-offset scheme of text-generation-inference and
vLLM, with the rules above for where a window may begin and end.

The tokenizers library has a `DecodeStream` of its own. It is no replacement: its text was not that
of decoding all tokens at once in 138 of 400 streams of tokens with byte fallback.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tbo_jax.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# Above this many pending tokens an unfinished window is searched for a place to cut it.
_LONG_WINDOW = 8


class WholeTokens(dict[int, str | None]):
    """The text of each token id that is whole characters by itself, whatever is before and after.

    It is None for any other id, and for all ids of a decoder that is not byte-level. Special tokens
    have no text. Found when it is first asked for, so that a look-up afterwards is all it costs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.any = _decoder_rules(tokenizer.decoder_description).byte_level

    def __missing__(self, token_id: int) -> str | None:
        found = None
        if self.any:
            with contextlib.suppress(UnicodeDecodeError):
                found = self._tokenizer.byte_level_bytes(token_id).decode("utf-8")
        self[token_id] = found
        return found


class IncrementalDetokenizer:
    """Emits the text of a sequence token by token, whole characters only.

    The concatenation of everything returned by `push` and `finish` equals
    `tokenizer.decode(all_ids, skip_special_tokens)` for every sequence of ids. A push decodes one
    token, or a window of a few, so its cost does not depend on the number of tokens before.

    For a decoder whose text can change anywhere until its end (such as one that strips the end of
    the whole text), everything is emitted by `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._rules = _decoder_rules(tokenizer.decoder_description)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._num_context = 0  # tokens at the front of the window whose text is out
        self._num_emitted = 0  # characters of the window's text that are out
        self._finished = False

    @property
    def is_whole(self) -> bool:
        """Whether all the text of the tokens so far is out."""
        if self._rules.byte_level:
            return not self._utf8.getstate()[0]
        return len(self._window) == self._num_context

    def push(self, token_id: int) -> str:
        """Text that has become certain with this token; possibly empty.

        Raises:
            TokenizerError: not a token id.
            RuntimeError: called after `finish`.
        """
        if self._finished:
            raise RuntimeError("push was called after finish")
        if self._rules.byte_level:
            return self._utf8.decode(
                self._tokenizer.byte_level_bytes(token_id, self._skip_special_tokens)
            )
        token = self._tokenizer.token(token_id, self._skip_special_tokens)
        if token is None:
            return ""
        self._window.append(token_id)
        if not self._rules.streams or (self._rules.byte_runs and _may_be_byte(token)):
            return ""
        text = self._decode(self._window)
        unfinished = text.endswith(_REPLACEMENT)
        delta = text[self._num_emitted : len(text) - unfinished]
        self._num_emitted += len(delta)
        if not unfinished:
            self._advance()
        elif len(self._window) - self._num_context > _LONG_WINDOW:
            self._cut(text)
        return delta

    def finish(self) -> str:
        """The text that was held back; an incomplete character comes out as U+FFFD."""
        if self._finished:
            return ""
        self._finished = True
        if self._rules.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._decode(self._window)[self._num_emitted :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def _advance(self) -> None:
        """Makes the pending tokens, whose text is out in full, the context of what follows."""
        pending = self._window[self._num_context :]
        text = self._decode(pending)
        # A context without text does not show that the decoder's treatment of the first token (a
        # stripped space, a missing separator) is over.
        if text:
            self._window, self._num_context, self._num_emitted = pending, len(pending), len(text)

    def _cut(self, text: str) -> None:
        """Drops all but the last token of a window that ends in U+FFFD, where that is exact.

        A byte sequence that reaches across the cut gives fewer characters decoded together than
        decoded apart, so equality proves that nothing reaches across.
        """
        last = self._window[-1:]
        last_text = self._decode(last)
        if last_text and self._decode(self._window[:-1]) + last_text == text:
            self._window, self._num_context, self._num_emitted = last, 0, len(last_text) - 1


@dataclass(frozen=True)
class _Rules:
    streams: bool  # text before the end of the tokens can be final
    byte_runs: bool = False  # a run of byte tokens is decoded as a whole
    byte_level: bool = False  # the text is that of the tokens' bytes, one after another


def _decoder_rules(description: Mapping[str, Any] | None) -> _Rules:
    """How the text of a decoder may be emitted; see the module docstring.

    The steps of a decoder map a list of strings to a list of strings. Steps before the list is
    fused into one string act on each token; steps after it act on the whole text.
    """
    steps = list(decoder_steps(description))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Rules(streams=True, byte_level=True)
    byte_runs = any(step["type"] == "ByteFallback" for step in steps)
    fused = seen_fallback = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip":
            if fused and (step["stop"] > 0 or step["content"] == _REPLACEMENT):
                return _Rules(streams=False)
        elif kind == "Replace":
            if not _replace_keeps_borders(step, fused, byte_runs):
                return _Rules(streams=False)
        elif fused:
            return _Rules(streams=False)
        elif kind == "ByteFallback":
            if seen_fallback:
                return _Rules(streams=False)
            seen_fallback = True
        elif kind == "ByteLevel":
            fused = True
        elif kind not in ("Metaspace", "WordPiece"):
            return _Rules(streams=False)
    return _Rules(streams=True, byte_runs=byte_runs)


def decoder_steps(description: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of `Tokenizer.decoder_description`, one after another; none without a decoder."""
    if description is None:
        return
    if description["type"] != "Sequence":
        yield description
        return
    for step in description["decoders"]:
        yield from decoder_steps(step)


def _replace_keeps_borders(step: Mapping[str, Any], fused: bool, byte_runs: bool) -> bool:
    if not fused:
        # Other content than spaces could turn an ordinary token into a byte token.
        return not byte_runs or step["content"].isspace()
    pattern = step["pattern"].get("String", "")
    return len(pattern) == 1 and _REPLACEMENT not in pattern + step["content"]


def _may_be_byte(token: str) -> bool:
    # Wider than the decoder's own test "<0xHH>": steps before it may still trim the token.
    return "<0x" in token

"""The text of single tokens, and log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.text import Tokenizer, TokenizerError, token_bytes

LEAST = -9999.0  # in place of minus infinity, which JSON does not have (vLLM)


class TokenTexts:
    """The bytes of each token of a vocabulary, and what JSON has in place of them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read the vocabulary, which takes up to a second."""
        self._tokenizer = tokenizer
        try:
            self._table: Sequence[bytes] = token_bytes(tokenizer, vocab_size).tokens
        except TokenizerError:  # of a decoder whose text does not follow from single tokens
            self._table = [tokenizer.decode([i], False).encode() for i in range(vocab_size)]

    def bytes(self, token_id: int) -> bytes:
        """Those that a token adds to a text; of a special token those of its name."""
        known = self._table[token_id] if token_id < len(self._table) else b""
        return known or (self._tokenizer.token(token_id, False) or "").encode()

    def text(self, token_id: int) -> str:
        """The text of a token, with a mark in place of half a character."""
        return self.bytes(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """A text that no other token has, also where it is half a character (OpenAI's form)."""
        raw = self.bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(known: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    """Entries of `logprobs.content` of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": max(logprob, LEAST),
            "bytes": list(texts.bytes(token_id)),
        }

    return [
        entry(one.token_id, one.logprob)
        | {"top_logprobs": [entry(i, logprob) for i, logprob in one.top.items()]}
        for one in known
    ]


class CompletionLogprobs:
    """The `logprobs` of a completion, whose offsets count from the beginning of its text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0
        # A character of several tokens counts once.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def form(
        self, token_ids: Sequence[int], known: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The entries of the next tokens, as many as `token_ids`."""
        texts = self._texts
        form: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, one in zip(token_ids, known, strict=True):
            form["tokens"].append(texts.key(token_id))
            form["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(texts.bytes(token_id)))
            if one is None:
                form["token_logprobs"].append(None)
                form["top_logprobs"].append(None)
                continue
            top = {texts.key(i): max(logprob, LEAST) for i, logprob in one.top.items()}
            top.setdefault(texts.key(token_id), max(one.logprob, LEAST))
            form["token_logprobs"].append(max(one.logprob, LEAST))
            form["top_logprobs"].append(top)
        return form


def extended(form: dict[str, list[Any]] | None, more: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two forms one after the other."""
    return more if form is None else {name: form[name] + more[name] for name in form}

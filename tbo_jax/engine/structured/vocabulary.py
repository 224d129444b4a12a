"""The tokens of a model as grammars see them: the bytes of each, and which end a text."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from tbo_jax.text import Tokenizer, TokenizerError, token_bytes

_LONGEST = (
    1000  # bytes of a token; a longer one is in no text here (llguidance's tree is 1024 deep)
)
_MARK = b"\xff"  # begins llguidance's names of special tokens, and is in no UTF-8
_SAMPLE = '{"a name": [1.5, null]}\n'
_NEVER = -1


class GrammarVocabulary:
    """The ids of a model for llguidance, which calls the bytes of all of them a tokenizer.

    Special tokens are no text: a grammar can only name them. End-of-sequence tokens are none either
    and are allowed where a text may end.

    Some decoders leave out the space before the first word of a text. The ids that this concerns
    have others in their place there, which may be above the model's and are never seen outside.

    Attributes:
        size: of the model's vocabulary, V.
        tokenizer: the same with the ids that stand for others.
        forces: where a grammar leaves one text only, its tokens are those that the tokenizer gives.
        ends: the end-of-sequence ids below V.
        own: mask [ceil(V / 32)] int32 of the model's ids.
    """

    def __init__(self, tokenizer: Tokenizer, end_of_sequence: Collection[int], size: int) -> None:
        """Args:
        tokenizer: of the model.
        end_of_sequence: ids that end a generation; those that the model does not have are left out.
        size: of the model's vocabulary. It may be another one than the tokenizer's.

        Raises:
            TokenizerError: the bytes of the tokens are not known (`text.token_bytes`).
        """
        self.size = size
        self.ends = sorted(i for i in end_of_sequence if i < size)
        self._encode = tokenizer.encode
        table = token_bytes(tokenizer, size)
        self._words = [_word(value) for value in table.tokens]
        names: dict[int, bytes] = {}
        for index in range(size):
            name = tokenizer.token(index, False)
            if index in self.ends or (name is not None and not table.tokens[index]):
                self._words[index] = b""
                if name:
                    names[index] = name.encode()
        self._ids = {word: i for i, word in reversed(list(enumerate(self._words))) if word}
        self._longest = max(map(len, self._ids), default=0)
        others: dict[bytes, int] = {}
        self._first: np.ndarray | None = None
        if table.first:
            self._first = np.arange(size)
            for index, value in table.first.items():
                word = _word(value) if self._words[index] else b""
                if word:
                    place = self._ids.get(word) or others.setdefault(word, size + len(others))
                self._first[index] = place if word else _NEVER
            self._first[self.ends] = self.ends
        self.forces = self._first is None and self._encoded(_SAMPLE) is not None
        wrapper = _Wrapper(self, [*self._words, *others], names)
        self.tokenizer = LLTokenizer(TokenizerWrapper(wrapper), eos_token=self.ends or None)
        self.own = self.all_but(())

    @property
    def mask_words(self) -> int:
        """Numbers of 32 bits that llguidance's masks have; ours have ceil(V / 32)."""
        return -(-self.tokenizer.vocab_size // 32)

    def all_but(self, ids: Collection[int]) -> np.ndarray:
        """The mask [ceil(V / 32)] int32 of all ids of the model but these."""
        bits = np.zeros(-(-self.size // 32) * 32, np.uint8)
        bits[: self.size] = 1
        bits[list(ids)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    def first(self, token: int) -> int:
        """The id that stands for `token` where it is the first one of a text."""
        return token if self._first is None else int(self._first[token])

    def first_mask(self, mask: np.ndarray) -> np.ndarray:
        """The tokens that may be a text's first: [mask_words] int32 of llguidance -> the same."""
        if self._first is None:
            return mask
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.zeros(mask.size * 32, np.uint8)
        allowed[: self.size] = np.where(self._first == _NEVER, 0, bits[self._first])
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def tokens_of(self, text: str) -> list[int]:
        """Ids whose bytes are `text`: as the tokenizer gives them, else the longest from the left.

        Bytes that no token has are left out.
        """
        ids = self._encoded(text)
        if ids is not None:
            return ids
        data, start = text.encode(), 0
        ids = []
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is not None:
                ids.append(self._ids[data[start:end]])
            start = start + 1 if end is None else end
        return ids

    def _encoded(self, text: str) -> list[int] | None:
        """The ids of the tokenizer, unless their bytes are other ones, as with a space before."""
        try:
            ids = self._encode(text, add_special_tokens=False)
        except TokenizerError:  # a byte has no token
            return None
        same = b"".join(self._words[i] if i < self.size else _MARK for i in ids) == text.encode()
        return ids if same else None


class _Wrapper:
    """What llguidance's `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, vocabulary: GrammarVocabulary, words: list[bytes], names: dict[int, bytes]
    ) -> None:
        self._vocabulary = vocabulary
        # Without one, an id more is made, which no model has.
        self.eos_token_id = vocabulary.ends[0] if vocabulary.ends else None
        self.tokens = list(words)
        self.special_token_ids = list(names)
        for index, name in names.items():
            self.tokens[index] = name

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("expected a str")  # by which the library knows
        return self._vocabulary.tokens_of(text)


def _word(value: bytes) -> bytes:
    return b"" if len(value) > _LONGEST or _MARK in value else value

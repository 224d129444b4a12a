"""The bytes of tokens one after another are the text that the tokenizers library gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    BYTE_TOKENS,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)
from tokenizers import Regex, decoders

from tbo_jax.text import Tokenizer, TokenizerError, token_bytes

WORDS = ["▁", "▁▁", "a", "▁the", "▁é", "né", ".", " b", "▁ c▁", "<0x4", "漢"]
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def of(*steps: decoders.Decoder) -> Tokenizer:
    return word_tokenizer(decoders.Sequence(list(steps)), [*BYTE_TOKENS, *WORDS])


TOKENIZERS = {
    "bytes": byte_level_tokenizer(),
    "Llama 2": sentencepiece_tokenizer(),
    "Gemma": of(*FALLBACK),
    "metaspace": of(decoders.Metaspace()),
    "metaspace, no prefix": of(decoders.Metaspace(prepend_scheme="never")),
    "metaspace, stripped": of(decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()),
    "two marks": of(decoders.Replace("▁the", "▁The"), *FALLBACK, decoders.Strip(" ", 1, 0)),
    "replaced late": of(decoders.ByteFallback(), decoders.Replace("a", "bc"), decoders.Fuse()),
    "no decoder": word_tokenizer(None, WORDS),
    "no step": word_tokenizer(decoders.Sequence([]), WORDS),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_bytes_of_tokens_are_their_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.vocab_size + 3  # models have more ids than tokens
    found = token_bytes(tokenizer, size)
    ids = st.integers(0, size - 1)
    if size > 256:
        ids |= st.integers(32, 126) | st.integers(256, size - 1)
    tokens = data.draw(st.lists(ids, max_size=8))
    parts = [found.tokens[token] for token in tokens]
    texted = [place for place, token in enumerate(tokens) if found.tokens[token]]
    if texted:
        parts[texted[0]] = found.first.get(tokens[texted[0]], parts[texted[0]])
    try:
        text = b"".join(parts).decode()
    except UnicodeDecodeError:
        return
    assert tokenizer.decode(tokens) == text


def test_special_tokens_and_ids_outside_have_none() -> None:
    found = token_bytes(TOKENIZERS["bytes"], 400)
    assert [i for i, value in enumerate(found.tokens) if not value] == [0, 1, *range(360, 400)]
    assert found.first == {}


def test_a_smaller_vocabulary() -> None:
    assert len(token_bytes(TOKENIZERS["Llama 2"], 40).tokens) == 40


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([decoders.WordPiece()], "WordPiece"),
        ([decoders.CTC()], "CTC"),
        ([decoders.BPEDecoder()], "BPEDecoder"),
        ([decoders.Replace(Regex("a+"), "b")], "Replace"),
        ([decoders.Fuse(), decoders.Replace("ab", "b")], "Replace"),
        ([decoders.ByteFallback(), decoders.Replace("é", "e")], "Replace"),
        ([*FALLBACK, decoders.Strip(" ", 2, 0)], "Strip"),
        ([*FALLBACK, decoders.Strip(" ", 0, 1)], "Strip"),
        ([decoders.Strip(" ", 1, 0)], "Strip"),
        ([decoders.Fuse(), decoders.ByteFallback()], "ByteFallback"),
        ([decoders.ByteLevel(), decoders.Fuse()], "ByteLevel"),
    ],
)
def test_a_decoder_that_looks_at_several_tokens_is_refused(
    steps: list[decoders.Decoder], named: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"has the step {{'type': '{named}'.*: expected Byte"):
        token_bytes(of(*steps), 10)

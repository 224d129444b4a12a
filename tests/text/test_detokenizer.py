from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)
from tokenizers import decoders

from tbo_jax.text import IncrementalDetokenizer, Tokenizer, TokenizerError

WORDS = ["▁", "a", "▁b", "##c", " ", ".", "\ufffd", "d\ufffd", "", "é", "<0x", "</w>e", "f</w>"]
SOME_BYTES = [f"<0x{byte:02X}>" for byte in "€ é".encode()]


def deltas(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def sequences(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids; drawing from a few of them often makes long runs and repetitions."""
    any_id = st.integers(0, tokenizer.vocab_size + 1)
    few = st.lists(any_id, min_size=1, max_size=4).flatmap(
        lambda pool: st.lists(st.sampled_from(pool), max_size=30)
    )
    return few | st.lists(any_id, max_size=30)


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_tokenizer()])
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(sequences(tokenizer))
    assert "".join(deltas(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),
    ],
    ids=str,
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_for_other_decoders(
    decoder: decoders.Decoder | None, data: st.DataObject
) -> None:
    tokenizer = word_tokenizer(decoder, [*WORDS, *SOME_BYTES])
    ids = data.draw(sequences(tokenizer))
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def test_character_of_several_tokens_comes_out_whole() -> None:
    tokenizer = word_tokenizer(decoders.ByteLevel(), ["x", "ð", "Ł", "ĺ", "Ģ", "y"])
    assert deltas(tokenizer, [0, 1, 2, 3, 4, 5]) == ["x", "", "", "", "😀", "y", ""]


def test_incomplete_character_comes_out_at_the_end() -> None:
    tokenizer = word_tokenizer(decoders.ByteLevel(), ["x", "ð", "Ł"])
    assert deltas(tokenizer, [0, 1, 2]) == ["x", "", "", "\ufffd"]


def test_bytes_are_held_until_their_run_is_over(sentencepiece: Tokenizer) -> None:
    euro, word = [0xE2, 0x82, 0xAC], 256 + 2
    assert deltas(sentencepiece, [word, *euro, word]) == ["a", "", "", "", "€a", ""]
    # A later byte that does not fit turns the whole run into replacement characters.
    assert deltas(sentencepiece, [word, *euro, 0xE2, word])[-2] == "\ufffd" * 4 + "a"


def test_special_tokens_do_not_end_a_run_of_bytes(sentencepiece: Tokenizer) -> None:
    special = sentencepiece.vocab_size - 1
    assert deltas(sentencepiece, [0xE2, special, 0x82, 0xAC, 256 + 2]) == [*[""] * 4, "€a", ""]


@pytest.mark.parametrize("text", ["naïve 😀 café " * 60, "€€"])
def test_text_streams_without_delay(byte_level: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    ids = byte_level.encode(text)
    out = ""
    for count, token_id in enumerate(ids, 1):
        out += detokenizer.push(token_id)
        assert out == byte_level.decode(ids[:count]).removesuffix("\ufffd")


@pytest.mark.parametrize(
    "cycle", ["the lazy dog 😀 ", b"\x80", b"\xf0\x9f", b"\xe2\x82\xac\xe2"], ids=repr
)
def test_window_does_not_grow_with_the_text(cycle: str | bytes) -> None:
    alphabet = sorted(decoders_alphabet())
    # Not the byte-level decoder alone, which needs no window.
    decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 0, 0)])
    tokenizer = word_tokenizer(decoder, [char for _, char in alphabet])
    raw = cycle.encode() if isinstance(cycle, str) else cycle
    sizes = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
        sizes.append(len(ids))
        return decode(self, ids, skip)

    with patch.object(Tokenizer, "decode", counting):
        out = deltas(tokenizer, list(raw * 100))
    assert "".join(out) == (raw * 100).decode(errors="replace")
    assert max(sizes) < 24


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_text_needs_no_decoder(byte_level: Tokenizer, skip: bool) -> None:
    ids = byte_level.encode("naïve 😀 <eos> café") + [byte_level.vocab_size + 7, 3]
    with patch.object(Tokenizer, "decode", side_effect=AssertionError):
        out = deltas(byte_level, ids, skip)
    assert "".join(out) == byte_level.decode(ids, skip)


def test_tokens_that_are_no_byte_level_text_are_their_utf_8() -> None:
    letters = [char for _, char in sorted(decoders_alphabet())]
    tokens = [*letters, "a b", "日本", "Ġ日", "Ã©", ""]
    tokenizer = word_tokenizer(decoders.ByteLevel(), tokens)
    for ids in [[i] for i in range(len(tokens))] + [[0xC3, 258], [259, 0xA9], [0xE6, 257]]:
        joined = b"".join(tokenizer.byte_level_bytes(i) for i in ids)
        assert joined.decode(errors="replace") == tokenizer.decode(ids)


def decoders_alphabet() -> list[tuple[int, str]]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [(b, chr(b)) for b in printable] + [(b, chr(256 + i)) for i, b in enumerate(others)]


@pytest.mark.parametrize(
    ("decoder", "tokens", "expected"),
    [
        (decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 0, 1)]), "abba", "abb"),
        (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "a .", "a."),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "ab", "c"),
        (
            decoders.Sequence([decoders.Replace("a", "<0x41>"), decoders.ByteFallback()]),
            ["a", "<0xC3>", "b"],
            "\ufffd\ufffdb",
        ),
        (decoders.BPEDecoder(), ["a</w>b", "c"], "a bc"),
        (decoders.CTC(), "aab", "ab"),
    ],
    ids=str,
)
def test_text_that_its_end_may_change_is_held(
    decoder: decoders.Decoder, tokens: Sequence[str], expected: str
) -> None:
    tokenizer = word_tokenizer(decoder, list(dict.fromkeys(tokens)))
    ids = [list(dict.fromkeys(tokens)).index(token) for token in tokens]
    assert deltas(tokenizer, ids) == [*[""] * len(ids), expected]


def test_long_window_without_a_place_to_cut_stays_exact() -> None:
    tokenizer = word_tokenizer(decoders.Metaspace(), ["\ufffd", "", "a"])
    ids = [0, *[1] * 20, 2]
    assert "".join(deltas(tokenizer, ids)) == "\ufffda"


def test_misuse_is_an_error(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    with pytest.raises(TokenizerError, match="token id"):
        detokenizer.push(-1)
    detokenizer.finish()
    assert detokenizer.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        detokenizer.push(5)

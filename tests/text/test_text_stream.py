from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import word_tokenizer
from tokenizers import decoders

from tbo_jax.text import TextStream, Tokenizer
from tbo_jax.text.detokenizer import IncrementalDetokenizer

# Few letters, so that drawn stop strings often occur, overlap and begin without being completed.
TOKENS = ["a", "b", "ab", "ba", "aab", "Ġ", "ðŁĺĢ", "ðŁ", "ĺ", "Ģ", "bab"]
TOKENIZER = word_tokenizer(decoders.ByteLevel(), TOKENS)
STOPS = st.lists(st.text("ab 😀\ufffd", min_size=1, max_size=5), max_size=4)
IDS = st.lists(st.integers(0, len(TOKENS)), max_size=25)


def run(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], **options: Any
) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer, stop, **options)
    deltas = [*map(stream.push, ids), stream.finish()]
    assert stream.text == "".join(deltas)
    return deltas, stream.stopped


def cut(
    text: str, stop: Sequence[str], *, after: int = 0, include: bool = False
) -> tuple[str, bool]:
    """The definition, character by character: the first end, then the longest match.

    It ends after character `after`.
    """
    for end in range(after + 1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches and include:
            return text[:end], True
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@settings(deadline=None, max_examples=300)
@given(ids=IDS, stop=STOPS)
def test_stream_is_the_text_before_the_first_stop(ids: list[int], stop: list[str]) -> None:
    deltas, stopped = run(TOKENIZER, ids, stop)
    assert ("".join(deltas), stopped) == cut(TOKENIZER.decode(ids), stop)


@settings(deadline=None, max_examples=300)
@given(ids=IDS, stop=STOPS, most=st.integers(0, 8), include=st.booleans())
def test_stop_strings_that_end_too_soon_are_not_seen(
    ids: list[int], stop: list[str], most: int, include: bool
) -> None:
    """And the one that is seen stays, where it was asked for."""
    deltas, stopped = run(TOKENIZER, ids, stop, min_tokens=most, include_stop=include)
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    after = len("".join(map(detokenizer.push, ids[:most])))
    text = TOKENIZER.decode(ids)
    expected = (text, False) if len(ids) <= most else cut(text, stop, after=after, include=include)
    assert ("".join(deltas), stopped) == expected


@settings(deadline=None)
@given(ids=IDS, stop=st.lists(st.text("ab</s>", min_size=1, max_size=5) | st.just("</s>b")))
def test_special_tokens_may_be_text(ids: list[int], stop: list[str]) -> None:
    deltas, stopped = run(TOKENIZER, ids, stop, skip_special_tokens=False)
    assert ("".join(deltas), stopped) == cut(TOKENIZER.decode(ids, False), stop)


@settings(deadline=None)
@given(data=st.data())
def test_same_for_byte_fallback(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from([0x61, 0x20, 0xE2, 256, 258, 259, 262]), max_size=25))
    stop = data.draw(st.lists(st.text("ab né\ufffd", min_size=1, max_size=4), max_size=3))
    deltas, stopped = run(sentencepiece, ids, stop)
    assert ("".join(deltas), stopped) == cut(sentencepiece.decode(ids), stop)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=25), stop=STOPS)
def test_no_more_is_held_than_a_stop_string_needs(ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, stop)
    for count, token_id in enumerate(ids, 1):
        stream.push(token_id)
        if stream.stopped:
            break
        held = TOKENIZER.decode(ids[:count]).removeprefix(stream.text)
        assert not held or any(string.startswith(held) for string in stop)


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([0, 1, 0], [], ["a", "b", "a", ""]),
        ([0, 1, 0], ["ba"], ["a", "", "", ""]),  # across a token border
        ([1, 0, 1, 1], ["aba"], ["b", "", "", "abb", ""]),  # begun, then not completed
        ([0, 0, 0, 1], ["aab"], ["", "", "a", "", ""]),  # begins again inside itself
        ([2, 0], ["aba", "b"], ["a", "", ""]),  # the match that ends first wins
        ([10], ["bab", "a"], ["b", ""]),  # also inside one token
        ([2, 0], ["b", "ab"], ["", "", ""]),  # same end: the longest wins
        ([0, 1], ["abb"], ["", "", "ab"]),  # held text comes out at the end
        ([0, 7, 8, 9, 0], ["😀"], ["a", "", "", "", "", ""]),  # a character of three tokens
        ([0, 7], ["\ufffd"], ["a", "", ""]),  # found in what finish releases
    ],
)
def test_deltas(ids: list[int], stop: list[str], expected: list[str]) -> None:
    assert run(TOKENIZER, ids, stop)[0] == expected


def test_stopped_is_set_by_the_token_that_completes_the_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["ba"])
    seen = []
    for token_id in [0, 1, 0, 1]:
        stream.push(token_id)
        seen.append(stream.stopped)
    assert seen == [False, False, True, True]


def test_stop_in_the_text_that_finish_releases_is_found() -> None:
    stream = TextStream(TOKENIZER, ["\ufffd"])
    stream.push(7)
    assert not stream.stopped
    assert stream.finish() == ""
    assert stream.stopped


@pytest.mark.parametrize("stop", ["ab", ["a", ""], [None], [b"a"], {"a"}, None])
def test_malformed_stop_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"stop.*: expected a"):
        TextStream(TOKENIZER, stop)


END = len(TOKENS)  # the id of "</s>", a special token


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([0, END, 1], ["</s>"], ["a", "", "", ""]),
        ([0, 1, END, 1], ["bc", "</s>"], ["a", "", "b", "", ""]),  # what was held is no stop
        ([0, 7, END], ["</s>"], ["a", "", "\ufffd", ""]),  # half a character
        ([0, 7, END], ["</s>", "\ufffd"], ["a", "", "", ""]),  # which may be a stop string
        ([0, END, 1], ["b"], ["a", "", "", ""]),  # another stop string: the token has no text
    ],
)
def test_a_special_token_stops(ids: list[int], stop: list[str], expected: list[str]) -> None:
    assert run(TOKENIZER, ids, stop) == (expected, True)


def test_a_special_token_that_stops_is_text_where_it_was_asked_for() -> None:
    assert run(TOKENIZER, [0, 1, END], ["</s>", "bc"], include_stop=True) == (
        ["a", "", "b</s>", ""],
        True,
    )
    ids = [0, END, 1, END, 1]
    assert run(TOKENIZER, ids, ["</s>"], min_tokens=2) == (["a", "", "b", "", "", ""], True)
    # Another stop string is found in what the token releases, and is the one that stays.
    assert run(TOKENIZER, [0, 7, END], ["</s>", "\ufffd"], include_stop=True) == (
        ["a", "", "\ufffd", ""],
        True,
    )


@settings(deadline=None)
@given(ids=IDS, stop=STOPS)
def test_stream_ends_at_a_special_token_or_before(ids: list[int], stop: list[str]) -> None:
    deltas, stopped = run(TOKENIZER, ids, [*stop, "</s>"])
    until = ids[: ids.index(END)] if END in ids else ids
    text, found = cut(TOKENIZER.decode(until), stop)
    assert ("".join(deltas), stopped) == (text, found or END in ids)


@pytest.mark.parametrize("string", ["</s>b", "a</s>", "</s></s>"])
def test_a_special_token_among_other_text_is_refused(string: str) -> None:
    with pytest.raises(ValueError, match=r"stop\[1\]: .* has the special token '</s>' among other"):
        TextStream(TOKENIZER, ["a", string])

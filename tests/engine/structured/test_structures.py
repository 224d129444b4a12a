"""Which tokens may follow, against the text that each of them would give."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders

from tbo_jax.engine.structured import grammars
from tbo_jax.engine.structured.grammars import MOST_KEPT, Grammars
from tbo_jax.engine.structured.structure import Structure
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import Tokenizer
from tests.engine.structured.letters import end_ids, letters_tokenizer
from tests.text.small_tokenizers import (
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    train_byte_level,
    word_tokenizer,
)

VOCABULARY = 400
WORDS = ["▁", "▁▁", "a", "b", "▁a", "▁ab", "ab", "▁.", "</s>", "▁the", "he"]
FREE = {"bad_words": ["zzzz"]}  # something else rules tokens out, so that none is forced


def of_words(decoder: decoders.Decoder | None) -> Tokenizer:
    return word_tokenizer(decoder, WORDS)


TOKENIZERS = {
    "letters": Tokenizer(letters_tokenizer()),
    "bytes": byte_level_tokenizer(),
    "Llama 2": sentencepiece_tokenizer(),
    "metaspace": of_words(decoders.Metaspace()),
    "metaspace, no prefix": of_words(decoders.Metaspace(prepend_scheme="never")),
    "no decoder": of_words(None),
}


def allowed(structure: Structure, most: int = VOCABULARY) -> list[int]:
    """Ids that may come next."""
    mask = np.frombuffer(structure.matcher.compute_bitmask(), np.int32)[None]
    bits = np.unpackbits(structure.masks(mask)[0].view(np.uint8), bitorder="little")
    assert len(bits) == -(-most // 32) * 32
    return np.flatnonzero(bits).tolist() if structure.error is None else []


def expected(
    tokenizer: Tokenizer, texts: Sequence[str], ends: Sequence[int], ids: list[int]
) -> list[int]:
    """Those after which the text is one of `texts` or begins one, and all ends after one."""
    so_far = tokenizer.decode(ids)
    found = set(ends) if so_far in texts else set()
    for token in set(range(VOCABULARY)) - set(ends):
        text = tokenizer.decode([*ids, token])
        if text != so_far and any(whole.startswith(text) for whole in texts):
            found.add(token)
    return sorted(found)


def random_texts(rng: random.Random) -> list[str]:
    parts = ["a", "b", "ab", " ", "  ", ".", " a", "the", " he"]
    texts = ["".join(rng.choices(parts, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 7))]
    return texts


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_the_tokens_that_may_follow_are_those_of_the_texts(name: str, seed: int) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(seed)
    ends = end_ids(tokenizer) if name == "letters" else [1]
    compiled = Grammars(tokenizer, [*ends, 5000], VOCABULARY)
    complete = 0
    for _ in range(8):
        texts = random_texts(rng)
        if name == "no decoder":  # the tokens, joined by spaces
            texts = [" ".join(rng.choices(WORDS[:8], k=rng.randrange(1, 5))) for _ in texts]
        structure = compiled.structure(SamplingParams(choice=texts, **FREE))
        assert structure is not None
        ids: list[int] = []
        while True:
            may = expected(tokenizer, texts, ends, ids)
            assert allowed(structure) == may
            if not may:  # there is a text, and no token for its next character
                assert "choice cannot be followed at gen" in str(structure.error)
                assert "no token has the text that may follow" in str(structure.error)
                break
            token = rng.choice(may)
            if token in ends:
                break
            ids.append(token)
            text = tokenizer.decode(ids)
            longer = any(other.startswith(text) and other != text for other in texts)
            is_complete = structure.push(token)
            assert is_complete == (text in texts and not longer)
            if is_complete:
                break
        complete += tokenizer.decode(ids) in texts
    assert complete > 0


def test_one_text_that_is_left_has_its_own_tokens() -> None:
    """Those that the tokenizer gives, where nothing else rules tokens out."""
    tokenizer = TOKENIZERS["letters"]
    compiled = Grammars(tokenizer, end_ids(tokenizer), VOCABULARY)
    structure = compiled.structure(SamplingParams(regex=r'\{"name": (null|true)\}'))
    assert structure is not None
    written: list[int] = []
    for token in tokenizer.encode('{"name": null}'):
        choice = allowed(structure)
        assert token in choice
        written += [len(choice)]
        structure.push(token)
    assert written.count(1) > len(written) // 2
    # Special tokens in it are text, and bytes that no token has are no reason to fail.
    structure = compiled.structure(SamplingParams(choice=["<|tool|>", "<|tool|>\U0001f600"]))
    assert structure is not None
    assert allowed(structure) == tokenizer.encode("<")


def test_special_tokens_are_allowed_by_name_only() -> None:
    tokenizer = TOKENIZERS["letters"]
    compiled = Grammars(tokenizer, end_ids(tokenizer), VOCABULARY)
    (tool,) = tokenizer.encode("<|tool|>")
    structure = compiled.structure(SamplingParams(grammar='start: <|tool|> "x"'))
    assert structure is not None
    assert allowed(structure) == [tool]
    assert not structure.push(tool)
    assert structure.push(tokenizer.encode("x")[0])


def test_a_text_ends_where_it_may_end() -> None:
    tokenizer = TOKENIZERS["letters"]
    ends = end_ids(tokenizer)
    compiled = Grammars(tokenizer, ends, VOCABULARY)
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")

    def after(params: SamplingParams, *tokens: int) -> set[int]:
        structure = compiled.structure(params)
        assert structure is not None
        structure.restart(tokens)
        return set(allowed(structure))

    assert not set(ends) & after(SamplingParams(regex="a+"))
    assert set(ends) < after(SamplingParams(regex="a+"), a)
    early = SamplingParams(regex="a+", min_tokens=3, stop_token_ids=[b])
    assert not set(ends) & after(early, a, a)
    assert set(ends) < after(early, a, a, a)
    # Where nothing but the end is left it may come all the same.
    assert after(SamplingParams(grammar="start: a\na: /a/ |", min_tokens=3), a) == set(ends)
    stop = SamplingParams(regex="[ab]+", min_tokens=2, stop_token_ids=[b])
    assert b not in after(stop, a) and b in after(stop, a, a)


def test_without_an_end_of_sequence_a_text_ends_when_it_is_complete() -> None:
    tokenizer = TOKENIZERS["letters"]
    structure = Grammars(tokenizer, (), VOCABULARY).structure(SamplingParams(regex="a{2,3}"))
    assert structure is not None
    (a,) = tokenizer.encode("a")
    assert [structure.push(a) for _ in range(3)] == [False, False, True]


def test_tokens_can_be_given_again_and_drafts_are_looked_at() -> None:
    tokenizer = TOKENIZERS["letters"]
    compiled = Grammars(tokenizer, end_ids(tokenizer), VOCABULARY)
    structure = compiled.structure(SamplingParams(regex="(ab)+c"))
    other = compiled.structure(SamplingParams(regex="(ab)+c"))
    assert structure is not None and other is not None
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    structure.restart([a, b, a])
    assert structure.acceptable((b, a, c)) == (b, a)
    assert structure.acceptable((b, c)) == (b, c)
    before = allowed(structure)
    assert structure.push(b) is False
    structure.restart([a, b, a])
    assert allowed(structure) == before and b in before
    assert a in allowed(other)  # which is where it was
    assert structure.push(c) is False
    assert "regex cannot be followed at generated token 3: " in str(structure.error)
    assert structure.push(b) is False  # nothing is followed any more
    assert structure.error is not None and structure.acceptable((b,)) == ()
    structure.restart([a, c])
    assert structure.error is not None
    structure.restart([a])
    assert structure.error is None and structure.acceptable((b,)) == (b,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(regex="(a"), 'regex cannot be used: invalid regex "(a" (in regex): regex parse'),
        (dict(regex="(?=a)"), "regex cannot be used: invalid regex"),
        (dict(json_schema={"type": "text"}), "json_schema cannot be used: failed to compile JSON "),
        (
            dict(json_schema={"not": {}}),
            "json_schema cannot be used: failed to compile JSON schema",
        ),
        (dict(json_schema='{"const": NaN}'), 'json_schema cannot be used: failed to parse "%json"'),
        (dict(grammar="start: foo"), 'grammar cannot be used: at 1(8): unknown name: "foo"'),
        (
            dict(grammar='root ::= "a" b'),
            "grammar cannot be used: Rule 'b' not found; expected GBN",
        ),
        (
            dict(grammar='start[temperature=1.0]: "a"'),
            "grammar has a rule with a temperature of it",
        ),
    ],
)
def test_what_cannot_be_a_grammar_is_named(options: dict[str, Any], message: str) -> None:
    compiled = Grammars(TOKENIZERS["letters"], [1], VOCABULARY)
    with pytest.raises(ValueError) as refused:
        compiled.structure(SamplingParams(**options))
    assert str(refused.value).startswith(f"SamplingParams.{message}")
    assert "no_forcing" not in str(refused.value)


def test_a_grammar_that_takes_too_much_for_its_first_token_is_refused() -> None:
    tokenizer = Tokenizer.from_folder(Path(__file__).parents[3] / "examples" / "kjv-moe")
    compiled = Grammars(tokenizer, [0], tokenizer.vocab_size)
    reason = r"regex cannot be used: lexer error: too many expressions constructed$"
    with pytest.raises(ValueError, match=reason):
        compiled.structure(SamplingParams(regex="(a{1000}){1000}"))


def test_a_tokenizer_whose_bytes_are_not_known_is_refused() -> None:
    compiled = Grammars(word_tokenizer(decoders.WordPiece(), WORDS), [1], VOCABULARY)
    with pytest.raises(ValueError, match=r"SamplingParams.regex cannot be had: the decoder of the"):
        compiled.structure(SamplingParams(regex="a"))
    assert compiled.structure(SamplingParams()) is None


def test_drafts_only_where_tokens_can_be_taken_back() -> None:
    compiled = Grammars(TOKENIZERS["letters"], [1], VOCABULARY)
    for text, takes_drafts in (
        ("start: /a+/", True),
        ("start[max_tokens=3]: /a+/", False),
        ('start: a "b"\na[stop="c"]: /a+/', False),
        ('root ::= "ab" | "b"', True),
    ):
        structure = compiled.structure(SamplingParams(grammar=text))
        assert structure is not None
        assert structure.takes_drafts == takes_drafts
        assert len(structure.acceptable(TOKENIZERS["letters"].encode("a"))) == takes_drafts


def test_what_the_library_leaves_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    compiled = Grammars(TOKENIZERS["letters"], [1], VOCABULARY)
    compiled.structure(SamplingParams(json_schema=lenient))
    assert "SamplingParams.json_schema: Unimplemented keys" in caplog.text


def test_grammars_are_compiled_once_and_the_last_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Grammars(TOKENIZERS["letters"], [1], VOCABULARY)
    made: list[str] = []
    matcher = grammars.LLMatcher

    def make(tokenizer: Any, grammar: str, **options: Any) -> Any:
        made.append(json.loads(grammar)["grammars"][0]["lark_grammar"])
        return matcher(tokenizer, grammar, **options)

    monkeypatch.setattr(grammars, "LLMatcher", make)
    for _ in range(3):
        compiled.structure(SamplingParams(regex="a+"))
    compiled.structure(SamplingParams(regex="a+", **FREE))  # its tokens are not forced
    assert len(made) == 2
    for count in range(MOST_KEPT - 1):
        compiled.structure(SamplingParams(regex=f"b{{{count + 1}}}"))
        compiled.structure(SamplingParams(regex="a+"))
    assert len(made) == MOST_KEPT + 1
    compiled.structure(SamplingParams(regex="b{1}"))
    compiled.structure(SamplingParams(regex="a+", **FREE))
    assert len(made) == MOST_KEPT + 2 and made[-1].endswith('{"no_forcing": true}')


def test_a_grammar_that_reached_a_limit_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matchers share what they have found out, which is too much by then."""
    limits = grammars.LLParserLimits
    monkeypatch.setattr(
        grammars, "LLParserLimits", lambda **given: limits(max_lexer_states=40, **given)
    )
    tokenizer = TOKENIZERS["letters"]
    compiled = Grammars(tokenizer, end_ids(tokenizer), VOCABULARY)
    errors = []
    for _ in range(3):
        structure = compiled.structure(SamplingParams(regex="[a-z]{100}"))
        assert structure is not None
        count = 0
        while (may := allowed(structure)) and structure.error is None:
            structure.push(may[-1])
            count += 1
        errors.append((count, structure.error))
    assert errors == errors[:1] * 3 and errors[0][0] > 1
    assert "too many states" in str(errors[0][1])


def test_several_threads_compile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for the grammar of another one."""
    compiled = Grammars(TOKENIZERS["letters"], [1], VOCABULARY)
    compiled.structure(SamplingParams(regex="x"))
    both = threading.Barrier(2, timeout=30)
    matcher = grammars.LLMatcher

    def make(*args: Any, **options: Any) -> Any:
        both.wait()
        return matcher(*args, **options)

    monkeypatch.setattr(grammars, "LLMatcher", make)
    found: list[Structure | None] = []
    threads = [
        threading.Thread(
            target=lambda text=text: found.append(compiled.structure(SamplingParams(regex=text)))
        )
        for text in ("a+", "b+")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and None not in found


def test_a_trained_byte_level_tokenizer_writes_every_character() -> None:
    """Its tokens are parts of characters, too."""
    tokenizer = Tokenizer(train_byte_level())
    structure = Grammars(tokenizer, [1], 360).structure(SamplingParams(regex="[é漢😀]{6}"))
    assert structure is not None
    rng, ids = random.Random(0), []
    while True:
        ids.append(rng.choice(allowed(structure, 360)))
        if structure.push(ids[-1]):
            break
    text = tokenizer.decode(ids)
    assert len(text) == 6 and set(text) <= set("é漢😀") and len(ids) > 12

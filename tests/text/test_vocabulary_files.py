"""Folders without a tokenizer.json: tiktoken.model and the SentencePiece tokenizer.model."""

from __future__ import annotations

import base64
import builtins
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import SENTENCES

from tbo_jax.text import IncrementalDetokenizer, Tokenizer, TokenizerError
from tbo_jax.text.tiktoken_model import MOST_RESERVED

KIMI_CLASS = "tokenization_kimi.TikTokenTokenizer"
# As the code that comes with Kimi K2 has it.
KIMI_PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
FEW = "abAB 12'sSlL\r\n\t漢字かé日\uff11\u0661.,-😀\u0301\u00a0\u2581"
TEXTS = st.text(FEW, max_size=40) | st.text(max_size=20)
# Words that can be joined in several ways, in an order that is not that of their length.
MORE = [
    "ab",
    "aba",
    "bab",
    "abab",
    "aa",
    "aaa",
    "aaaa",
    "",
    "the",
    "'",
    "'s'S's",
    "12",
    "123",
    "漢字",
    "😀",
    "a1",
    "é",
] + ["  ", " a", "\r\n"]
RESERVED = "<|reserved_token_{}|>"


def tiktoken_tokens() -> list[bytes]:
    joined = [text.encode() for text in MORE if len(text.encode()) > 1]
    tokens = [*reversed(joined), *(bytes([byte]) for byte in range(256)), "漢".encode()[:2]]
    return list(dict.fromkeys(tokens))


def write_tiktoken(folder: Path, tokens: Sequence[bytes], **config: Any) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    entries = {"auto_map": {"AutoTokenizer": [KIMI_CLASS, None]}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    folder, tokens = tmp_path_factory.mktemp("kimi"), tiktoken_tokens()
    size = len(tokens)
    added = {
        str(size): {"content": "[BOS]", "special": True},
        str(size + 2): {"content": "<|tool|>", "special": False},
        str(size + 3): {"content": "[EOS]", "special": True},
    }
    write_tiktoken(folder, tokens, added_tokens_decoder=added, eos_token="[EOS]")
    special = {"[BOS]": size, RESERVED.format(size + 1): size + 1}
    special |= {"<|tool|>": size + 2, "[EOS]": size + 3}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    reference = tiktoken.Encoding(
        "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return Tokenizer.from_folder(folder), reference


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_tiktoken_model_tokenizes_as_tiktoken(
    kimi: tuple[Tokenizer, tiktoken.Encoding], data: st.DataObject
) -> None:
    tokenizer, reference = kimi
    pieces = st.one_of(TEXTS, st.sampled_from([*MORE, *reference.special_tokens_set]))
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    ids = reference.encode(text, allowed_special="all")
    assert tokenizer.encode(text) == ids
    ids = data.draw(st.lists(st.integers(0, reference.n_vocab - 1), max_size=12))
    assert tokenizer.decode(ids, False) == reference.decode(ids, errors="replace")
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_tokens_of_a_tiktoken_folder_have_their_flags(
    kimi: tuple[Tokenizer, tiktoken.Encoding],
) -> None:
    tokenizer, reference = kimi
    special = [reference.encode_single_token(text) for text in reference.special_tokens_set]
    assert tokenizer.decode(special) == "<|tool|>"
    assert tokenizer.eos_token_id == reference.encode_single_token("[EOS]")
    assert tokenizer.vocab_size == reference.n_vocab


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": [f"moonshotai/Kimi-K2--{KIMI_CLASS}", None]},
        {"auto_map": None, "tokenizer_class": "TikTokenTokenizer"},
    ],
)
def test_the_class_is_found_where_configs_name_it(tmp_path: Path, config: Any) -> None:
    write_tiktoken(tmp_path, tiktoken_tokens(), **config)
    assert Tokenizer.from_folder(tmp_path).decode([0]) == tiktoken_tokens()[0].decode()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}, "_x.XTokenizer'"),
        ({"auto_map": {}, "tokenizer_class": "QWenTokenizer"}, "'QWenTokenizer'"),
        ({"auto_map": None}, "class None"),
    ],
)
def test_an_unknown_pattern_is_refused(tmp_path: Path, config: Any, named: str) -> None:
    write_tiktoken(tmp_path, tiktoken_tokens(), **config)
    with pytest.raises(TokenizerError, match=f"pattern .* not known .*{named}.*{KIMI_CLASS}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("YQ== 0\nYg==\n", r"line 2: expected a token in base64 and its rank, got b'Yg=='"),
        ("Y!== 0\n", "line 1: expected a token in base64"),
        ("YQ== 0\nYQ== 1\n", "line 2: the token b'a' occurs twice"),
        ("YQ== 0\nYg== 2\n", "expected the ranks 0 to 1, each once"),
    ],
)
def test_a_malformed_tiktoken_model_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_tiktoken(tmp_path, [])
    (tmp_path / "tiktoken.model").write_text(text)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_an_id_far_above_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokens = tiktoken_tokens()
    most = len(tokens) + MOST_RESERVED
    write_tiktoken(tmp_path, tokens, added_tokens_decoder={str(most + 1): {"content": "<far>"}})
    with pytest.raises(
        TokenizerError, match=rf"config\.json: token '<far>' has the id {most + 1}; .* most {most},"
    ):
        Tokenizer.from_folder(tmp_path)


def test_a_byte_without_a_token_is_refused_not_dropped(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, [bytes([byte]) for byte in range(128)])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a b") == [97, 32, 98]
    with pytest.raises(TokenizerError, match="'é'.*no token for the byte 0xa9"):
        tokenizer.encode("é")


def train_sentencepiece(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A small model in `folder`, with the tokenizer class of ERNIE."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join([*SENTENCES, *["the lazy dog jumps " * n for n in range(1, 5)]]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=3,
        **options,
    )
    config = {"tokenizer_class": "Ernie4_5_Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


IDENTITY = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
KINDS: dict[str, dict[str, Any]] = {
    "bpe": dict(model_type="bpe", byte_fallback=True, **IDENTITY),
    "bpe, no prefix": dict(
        model_type="bpe", byte_fallback=True, add_dummy_prefix=False, **IDENTITY
    ),
    "bpe, normalised": dict(model_type="bpe", byte_fallback=True),
    "bpe, user's pieces": dict(
        model_type="bpe", byte_fallback=True, user_defined_symbols=["<mask>", "dog"], **IDENTITY
    ),
    "bpe, unknown": dict(model_type="bpe", **IDENTITY),
    "unigram": dict(model_type="unigram", byte_fallback=True),
}


@pytest.fixture(scope="module", params=KINDS)
def ernie(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ernie")
    reference = train_sentencepiece(folder, **KINDS[request.param])
    return Tokenizer.from_folder(folder), reference, KINDS[request.param]


# Always the same texts: of two equally probable ways to cut one, a unigram model may take either.
@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_tokenizer_model_tokenizes_as_sentencepiece(
    ernie: tuple[Tokenizer, sentencepiece.SentencePieceProcessor, dict[str, Any]],
    data: st.DataObject,
) -> None:
    tokenizer, reference, options = ernie
    words = st.sampled_from(["the lazy dog", " jumps", "<mask>", "<0x41>", "dog", "ﬁ ", "   "])
    text = "".join(data.draw(st.lists(TEXTS | words, max_size=5))).replace("\0", "")
    ids = reference.encode(text)
    assert tokenizer.encode(text) == ids
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)
    if "remove_extra_whitespaces" in options and reference.unk_id() not in ids:
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_special_tokens_of_a_sentencepiece_model(tmp_path: Path) -> None:
    reference = train_sentencepiece(tmp_path, control_symbols=["<sep>"], **KINDS["bpe"])
    config = {"tokenizer_class": "Ernie4_5_Tokenizer", "additional_special_tokens": ["<mask:1>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": reference.vocab_size()}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    sep, size = reference.piece_to_id("<sep>"), reference.vocab_size()
    ids = tokenizer.encode("a<sep>b<new></s><mask:1>")
    a, b = reference.encode("a"), reference.encode("b")
    assert ids == [*a, sep, *b, size, reference.eos_id(), size + 1]
    assert tokenizer.decode(ids) == "a b<new>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_the_config_says_what_is_put_around_a_text(
    tmp_path: Path, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    reference = train_sentencepiece(tmp_path, **KINDS["bpe"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("dog") == [*before, *reference.encode("dog"), *after]
    assert tokenizer.encode("dog", add_special_tokens=False) == reference.encode("dog")


def test_a_token_around_a_text_must_exist(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, tiktoken_tokens(), add_bos_token=True)
    with pytest.raises(TokenizerError, match="add_bos_token is true, but there is no bos_token"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (dict(model_type="char"), {}, "model type 4 is not supported; expected a BPE or unigram"),
        (dict(treat_whitespace_as_suffix=True), {}, "whitespace as a suffix is not supported"),
        ({}, {"tokenizer_class": "T5Tokenizer"}, "class 'T5Tokenizer' is not supported"),
    ],
)
def test_other_sentencepiece_models_are_refused(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    train_sentencepiece(tmp_path, **options)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"not a model", b"\xff" * 40])
def test_what_is_no_sentencepiece_model_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(TokenizerError, match="expected a SentencePiece model"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_sentencepiece(tmp_path)
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sentencepiece"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TokenizerError, match=r"pip install 'tbo-jax\[sentencepiece\]'"):
        Tokenizer.from_folder(tmp_path)

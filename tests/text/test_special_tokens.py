"""Which tokens count as special; what is expected here is what transformers 5.24 gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tbo_jax.text import IncrementalDetokenizer, Tokenizer, TokenizerError

# Ids: 256 "ab", 257 "<im>" and 258 "<pad>" are ordinary entries of the vocabulary, 259 "<tool>" is
# an added token that is not special, 260 "</s>" a special one. "<new>" is nowhere.
VOCAB = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<im>", "<pad>"]
TEXT = "ab<im> <pad> <tool> </s> <new>"
Files = Mapping[str, Any]


def write_folder(folder: Path, files: Files) -> None:
    vocab = {token: index for index, token in enumerate(VOCAB)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool>"), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def config(**entries: Any) -> Files:
    return {"tokenizer_config": entries}


def added(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": content, **flags}


# Files, ids of TEXT that are no bytes, and what decoding those ids shows.
CASES: dict[str, tuple[Files, list[int], str]] = {
    "nothing": ({}, [256, 259, 260], "ab<tool>"),
    "a name in the config": (config(bos_token="<im>"), [256, 257, 259, 260], "ab<tool>"),
    "an extra token": (config(extra_special_tokens=["<im>"]), [256, 257, 259, 260], "ab<tool>"),
    "its older key": (
        config(additional_special_tokens=["<pad>"]),
        [256, 258, 259, 260],
        "ab<tool>",
    ),
    "both keys: the newer": (
        config(additional_special_tokens=["<pad>"], extra_special_tokens=["<im>"]),
        [256, 257, 259, 260],
        "ab<tool>",
    ),
    "extra tokens with names": (
        config(extra_special_tokens={"image_token": "<im>"}),
        [256, 257, 259, 260],
        "ab<tool>",
    ),
    "a name of a model": (config(image_token="<im>"), [256, 257, 259, 260], "ab<tool>"),
    "a flag is no token": (config(add_bos_token=True), [256, 259, 260], "ab<tool>"),
    "a token that is nowhere": (config(pad_token="<new>"), [256, 259, 260, 261], "ab<tool>"),
    "a named token that is not special yet": (config(eos_token="<tool>"), [256, 259, 260], "ab"),
    "an extra token that is not special yet": (
        config(extra_special_tokens=["<tool>"]),
        [256, 259, 260],
        "ab<tool>",
    ),
    "an object": (config(bos_token=added("<im>", rstrip=True)), [256, 257, 259, 260], "ab<tool>"),
    "the map": ({"special_tokens_map": {"bos_token": "<im>"}}, [256, 257, 259, 260], "ab<tool>"),
    "the map's extra tokens": (
        {"special_tokens_map": {"additional_special_tokens": ["<im>", "<pad>"]}},
        [256, 257, 258, 259, 260],
        "ab<tool>",
    ),
    "the map before the config": (
        {**config(bos_token="<pad>"), "special_tokens_map": {"bos_token": "<im>"}},
        [256, 257, 259, 260],
        "ab<tool>",
    ),
    "the map takes a name away": (
        {**config(bos_token="<im>"), "special_tokens_map": {"bos_token": None}},
        [256, 259, 260],
        "ab<tool>",
    ),
    "the config before the map for a model's names": (
        {**config(image_token="<im>"), "special_tokens_map": {"image_token": "<pad>"}},
        [256, 257, 259, 260],
        "ab<tool>",
    ),
    "added_tokens.json": ({"added_tokens": {"<new>": 261}}, [256, 259, 260, 261], "ab<tool><new>"),
    "added_tokens.json, of the vocabulary": (
        {"added_tokens": {"<im>": 257}},
        [256, 257, 259, 260],
        "ab<im><tool>",
    ),
    "added_tokens.json with a name": (
        {**config(pad_token="<new>"), "added_tokens": {"<new>": 261}},
        [256, 259, 260, 261],
        "ab<tool>",
    ),
    "added_tokens_decoder adds": (
        config(added_tokens_decoder={"257": {"content": "<im>", "special": True}}),
        [256, 257, 259, 260],
        "ab<tool>",
    ),
    "its flag special": (
        config(added_tokens_decoder={"259": {"content": "<tool>", "special": True}}),
        [256, 259, 260],
        "ab",
    ),
    "its flags against those of tokenizer.json": (
        config(added_tokens_decoder={"260": {"content": "</s>", "lstrip": True}}),
        [256, 259, 260],
        "ab<tool>",  # once special, it is skipped for good
    ),
    "it replaces the map and added_tokens.json": (
        {
            **config(added_tokens_decoder={}),
            "special_tokens_map": {"bos_token": "<im>"},
            "added_tokens": {"<new>": 261},
        },
        [256, 259, 260],
        "ab<tool>",
    ),
    "special tokens are split": (
        config(split_special_tokens=True, bos_token="<im>"),
        [256, 259],
        "ab<tool>",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_count_as_in_transformers(tmp_path: Path, case: str) -> None:
    files, expected, shown = CASES[case]
    write_folder(tmp_path, files)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = [token_id for token_id in tokenizer.encode(TEXT) if token_id > 255]
    assert ids == expected
    assert tokenizer.decode(ids) == shown
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == shown


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [256, 220, 257, 220, 256]),
        ({"lstrip": True}, [256, 257, 220, 256]),
        ({"rstrip": True}, [256, 220, 257, 256]),
    ],
)
def test_flags_count(tmp_path: Path, flags: Mapping[str, bool], expected: list[int]) -> None:
    write_folder(tmp_path, config(bos_token=added("<im>", **flags)))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab <im> ab") == expected


def test_a_template_sees_every_name(tmp_path: Path) -> None:
    entries = dict(eos_token="</s>", image_token="<im>", extra_special_tokens={"x_token": "<pad>"})
    template = "{{ eos_token }}{{ image_token }}{{ x_token }}"
    write_folder(tmp_path, config(**entries, chat_template=template))
    messages = [{"role": "user", "content": ""}]
    assert Tokenizer.from_folder(tmp_path).encode_chat(messages) == [260, 257, 258]


@pytest.mark.parametrize(
    "files",
    [
        config(added_tokens_decoder={"300": {"content": "<new>"}}),
        {"added_tokens": {"<new>": 300}},
    ],
)
def test_a_gap_before_an_id_is_closed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: Files
) -> None:
    write_folder(tmp_path, files)
    assert Tokenizer.from_folder(tmp_path).encode("<new>") == [261]
    assert "'<new>' is declared with id 300, but the next free id is 261" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (config(added_tokens_decoder={"258": {"content": "<im>"}}), "'<im>' .*id 258.*id 257"),
        ({"added_tokens": {"<im>": 300}}, "added_tokens.json: '<im>' .*id 300.*id 257"),
        ({"added_tokens": {"</s>": 300}}, "added_tokens.json: '</s>' .*id 300.*id 260"),
    ],
)
def test_an_id_against_that_of_the_vocabulary_is_refused(
    tmp_path: Path, files: Files, message: str
) -> None:
    write_folder(tmp_path, files)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)

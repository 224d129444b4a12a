from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from tbo_jax.text import Tokenizer, TokenizerError

Write = Callable[[str, str], None]


def test_text_survives_a_round_trip(byte_level: Tokenizer) -> None:
    text = " naïve 😀\n\tcafé €"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_special_tokens_are_added_and_skipped_on_request(byte_level: Tokenizer) -> None:
    with_bos, without = byte_level.encode("fox"), byte_level.encode("fox", add_special_tokens=False)
    assert with_bos == [0, *without]
    assert byte_level.decode(with_bos) == "fox"
    assert byte_level.decode(with_bos, skip_special_tokens=False) == "<bos>fox"


def test_truncation_and_padding_of_the_file_are_switched_off(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = backend.encode("the lazy dog").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("the lazy dog") == expected


def test_vocab_size_covers_every_id(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()
    assert tokenizer.vocab_size == max(ids) + 1
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("a")]) == "a"


@pytest.mark.parametrize("entry", ["<eos>", {"content": "<eos>", "lstrip": False}])
def test_named_tokens_come_from_the_config(folder: Path, write: Write, entry: object) -> None:
    write("tokenizer_config.json", json.dumps({"eos_token": entry, "bos_token": None}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 1)
    assert tokenizer.bos_token is None


def test_named_tokens_come_from_the_map(folder: Path, write: Write) -> None:
    write("special_tokens_map.json", json.dumps({"bos_token": {"content": "<bos>"}}))
    assert Tokenizer.from_folder(folder).bos_token == "<bos>"


def test_config_with_added_tokens_overrides_the_map(folder: Path, write: Write) -> None:
    added = {"0": {"content": "<bos>", "special": True}}
    write(
        "tokenizer_config.json", json.dumps({"eos_token": "<eos>", "added_tokens_decoder": added})
    )
    write("special_tokens_map.json", json.dumps({"eos_token": "<bos>"}))
    assert Tokenizer.from_folder(folder).eos_token == "<eos>"


def test_added_token_that_only_the_config_lists_is_added(folder: Path, write: Write) -> None:
    new_id = Tokenizer.from_folder(folder).vocab_size
    added = {str(new_id): {"content": "<tool>", "special": True}}
    write("tokenizer_config.json", json.dumps({"added_tokens_decoder": added}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [new_id]
    assert tokenizer.decode([new_id]) == ""


def test_added_token_with_another_id_is_refused(folder: Path, write: Write) -> None:
    write("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "<bos>"}}}')
    with pytest.raises(TokenizerError, match=r"'<bos>' is declared with id 7.*at id 0"):
        Tokenizer.from_folder(folder)


def test_missing_tokenizer_names_folder_and_expectation(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer.json") as caught:
        Tokenizer.from_folder(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)


def test_a_deep_tokenizer_is_refused(folder: Path, write: Write) -> None:
    write("tokenizer.json", '{"model": ' + "[" * 10**5)
    with pytest.raises(TokenizerError, match=r"tokenizer.json is corrupt.*recursion limit"):
        Tokenizer.from_folder(folder)


def test_a_token_with_two_ids_is_refused(folder: Path, write: Write) -> None:
    text = (folder / "tokenizer.json").read_text("utf-8")
    assert '"vocab":{' in text.replace(" ", "")
    head, _, rest = text.partition('"vocab":')
    write("tokenizer.json", f'{head}"vocab":{{"a":7,{rest.lstrip().removeprefix("{")}')
    with pytest.raises(TokenizerError, match=r"tokenizer.json.*key 'a' occurs 2 times"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("keep", [0, 1, 400])
def test_truncated_tokenizer_is_refused(folder: Path, keep: int) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TokenizerError, match=r"tokenizer.json is corrupt"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", '{"x": ' + "[" * 10**5, "nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": "a", "eos_token": "b"}', "'eos_token' occurs 2"),
        ("special_tokens_map.json", '{"x": {"a": 1, "a": 1}}', "key 'a' occurs 2 times"),
        ("added_tokens.json", '{"<x>": 400, "<x>": 401}', "key '<x>' occurs 2 times"),
        ("tokenizer_config.json", "[]", "expected a JSON object, got list"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token: expected a str"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "expected an object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"1": 2}}',
            r"\[1\]: expected an object",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"1": {"content": "<eos>", "special": "yes"}}}',
            "each true or false, got 'special': 'yes'",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": {"content": "<eos>", "strip": true}}',
            "expected lstrip, .*, got 'strip': True",
        ),
        ("tokenizer_config.json", '{"extra_special_tokens": "<x>"}', "expected a list of tokens"),
        ("tokenizer_config.json", '{"split_special_tokens": 1}', "expected true or false, got 1"),
        ("added_tokens.json", '{"<x>": "7"}', "'<x>': expected a token id, got '7'"),
        ("added_tokens.json", '{"<x>": 0}', "'<x>' is declared with id 0, which '<bos>' has"),
        ("special_tokens_map.json", '{"bos_token": ["<s>"]}', "bos_token: expected a str"),
    ],
)
def test_malformed_config_is_refused(
    folder: Path, write: Write, name: str, text: str, message: str
) -> None:
    write(name, text)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 2**32, "a", None, 1.0])
def test_decode_refuses_what_is_no_id(byte_level: Tokenizer, bad: object) -> None:
    with pytest.raises(TokenizerError, match="token id: expected an integer"):
        byte_level.decode([bad])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", ["a\ud800b", b"bytes", None])
def test_encode_refuses_what_is_no_text(byte_level: Tokenizer, bad: object) -> None:
    with pytest.raises(TokenizerError, match=r"text"):
        byte_level.encode(bad)  # type: ignore[arg-type]


def test_a_decoder_that_fails_is_an_error_that_names_no_file() -> None:
    class Failing:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            raise ValueError("no such byte")

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = tokenizers.decoders.Decoder.custom(Failing())
    with pytest.raises(TokenizerError, match="the decoder of the tokenizer failed: .*no such byte"):
        Tokenizer(backend).decode([0])

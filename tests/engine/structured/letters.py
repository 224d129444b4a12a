"""A small byte-level tokenizer that can write JSON, for the golden models of 160 ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tbo_jax.text import Tokenizer
from tests.golden_cases import DATA

SPECIAL = ["<|end|>", "<|stop|>", "<|tool|>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
LONGER = "é ö 漢"  # whose bytes are tokens
JOINED = [
    '{"', '":', '",', '"}', '["', '"]', "]}", 'e"', "tr", "tru", "true", "fa", "fal", "fals", "false",
    "nu", "nul", "null", "ab", "abc", "00", "12", "123", "an", "and", "the", "th", "he", "in", "is",
    "ne", "no", "yes", "es",
]  # fmt: skip
ENDS = ("<|end|>", "<|stop|>", "12")  # one of them is text, which it never is in a generation


def letters_tokenizer() -> tokenizers.Tokenizer:
    """It has fewer ids than the models, and no token for most bytes above 127."""
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def letters(text: str) -> str:
        return to_letters.pre_tokenize_str(text)[0][0]

    alphabet = dict.fromkeys(letter for c in [*CHARACTERS, *LONGER] for letter in letters(c))
    joined = [letters(text) for text in JOINED] + [letters("é"), letters("漢")[:2]]
    vocabulary = [*SPECIAL, *alphabet, *sorted(joined, key=len)]
    known = set(vocabulary)
    merges = [
        (token[:cut], token[cut:])
        for token in vocabulary[len(SPECIAL) :]
        for cut in range(1, len(token))
        if {token[:cut], token[cut:]} <= known
    ]
    vocab = {token: index for index, token in enumerate(vocabulary)}
    assert len(vocab) == len(vocabulary) < 160
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = to_letters
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def end_ids(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.encode(text)[0] for text in ENDS]


def with_letters(name: str, folder: Path) -> Path:
    """Copy a golden case to `folder`, with that tokenizer and several end-of-sequence ids."""
    shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
    backend = letters_tokenizer()
    backend.save(str(folder / "tokenizer.json"))
    ends = end_ids(Tokenizer(backend))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder

"""Tokenizers of folders that have a `tiktoken.model` in place of a `tokenizer.json`.

The file holds the tokens of a byte-level BPE and their ranks. It is turned into a tokenizer of the
tokenizers library, so that special tokens, streams and chat templates work as with any other. The
tokens of a text are those of the tiktoken library.

The pattern that cuts a text into words is not in the file but in the code that comes with a model,
which is never run; `_PATTERNS` has those of the models that are known here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tbo_jax.text.files import TokenizerError
from tbo_jax.text.special_tokens import DeclaredTokens

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MOST_RESERVED = 10_000  # ids; each that no file names becomes a token
# By what `auto_map` of tokenizer_config.json names, or its `tokenizer_class` where it has no map.
_PATTERNS = {"tokenization_kimi.TikTokenTokenizer": _KIMI, "TikTokenTokenizer": _KIMI}


def read_tiktoken_model(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a `tiktoken.model`, without its special tokens.

    Args:
        path: of the file.
        config: contents of the `tokenizer_config.json` beside it, which tells the pattern.

    Raises:
        TokenizerError: the file is malformed, or no pattern is known for the tokenizer's class.
    """
    pattern = _pattern(path, config)
    ranks = _read_ranks(path)
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # tiktoken joins the two neighbours whose bytes together have the lowest rank, whatever the two
    # are, so every way to cut a token in two is a merge.
    merges = [
        (rank, names[token[:cut]], names[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in names and token[cut:] in names
    ]
    merges.sort(key=lambda merge: merge[0])
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={names[token]: rank for token, rank in ranks.items()},
            merges=[(left, right) for _, left, right in merges],
            ignore_merges=True,  # a word that is a token is that token, however it could be merged
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def with_reserved(tokens: DeclaredTokens, vocab_size: int) -> DeclaredTokens:
    """The tokens with those that a model reserves between the vocabulary and the last of them.

    They have no name in a file; `<|reserved_token_ID|>` is Kimi's, which transformers gives too.

    Raises:
        TokenizerError: a token has an id more than `MOST_RESERVED` above the vocabulary.
    """
    listed = dict(tokens.listed)
    if (last := max(listed, default=0)) > vocab_size + MOST_RESERVED:
        raise TokenizerError(
            f"{tokens.source}: token {str(listed[last])!r:.80} has the id {last}; expected at most "
            f"{vocab_size + MOST_RESERVED}, {MOST_RESERVED:,} above the vocabulary"
        )
    for token_id in range(vocab_size, max(listed, default=0)):
        text = f"<|reserved_token_{token_id}|>"
        listed.setdefault(token_id, tokenizers.AddedToken(text, special=True))
    return replace(tokens, listed=listed)


def _pattern(path: Path, config: Mapping[str, Any]) -> str:
    entry = config.get("auto_map")
    if isinstance(entry, Mapping):
        entry = entry.get("AutoTokenizer")
    if isinstance(entry, list):
        entry = next((item for item in entry if item is not None), None)
    if entry is None:
        entry = config.get("tokenizer_class")
    name = entry.rpartition("--")[2] if isinstance(entry, str) else entry
    if not isinstance(name, str) or name not in _PATTERNS:
        known = ", ".join(sorted(_PATTERNS))
        raise TokenizerError(
            f"{path}: the pattern that cuts a text into words is not known for the tokenizer class "
            f"{name!r:.80} of tokenizer_config.json; expected one of {known}, or a folder with a "
            "tokenizer.json"
        )
    return _PATTERNS[name]


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            if not token or not rank.isdigit():
                raise ValueError
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{path}, line {number}: expected a token in base64 and its rank, got {line!r:.80}"
            ) from None
        if token in ranks:
            raise TokenizerError(f"{path}, line {number}: the token {token!r:.80} occurs twice")
        ranks[token] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: expected the ranks 0 to {len(ranks) - 1}, each once")
    return ranks


def missing_bytes(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Bytes without a token, which a text must not have: tiktoken fails, the backend drops them."""
    return frozenset(b for b, c in enumerate(_letters()) if backend.token_to_id(c) is None)


def _letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them.

    Bytes that are printable in Latin-1 stand for themselves, the others follow from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

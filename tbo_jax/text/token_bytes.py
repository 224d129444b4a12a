"""The bytes that each token of a vocabulary adds to a text, for what works on bytes: grammars.

A decoder maps the tokens of a text to a list of strings, step by step, and joins them. Those of
most language models map each token by itself, but for the first one of a text, which may lose a
space. That is what can be told in a table; other decoders are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tbo_jax.text.detokenizer import decoder_steps
from tbo_jax.text.files import TokenizerError
from tbo_jax.text.tokenizer import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_EXPECTED = (
    "expected ByteLevel alone, or any of Replace (of a text, and of one character after Fuse or "
    "ByteFallback), Metaspace, ByteFallback, Fuse and Strip (after Fuse, of one character at the "
    "start)"
)

Action = Callable[[str | bytes], str | bytes]


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of each id, in a text that is decoded without special tokens.

    Attributes:
        tokens: of each id; empty where it has no text: special tokens, ids outside the vocabulary.
        first: of the ids that add something else where they are a text's first.
    """

    tokens: Sequence[bytes]
    first: Mapping[int, bytes]


def token_bytes(tokenizer: Tokenizer, size: int) -> TokenBytes:
    """The bytes of the ids below `size`.

    Where they are UTF-8, the bytes of any ids one after another are the text that
    `tokenizer.decode` gives for them.

    Raises:
        TokenizerError: the decoder is none whose text follows from the bytes of each token.
    """
    steps = list(decoder_steps(tokenizer.decoder_description))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenBytes([tokenizer.byte_level_bytes(i) for i in range(size)], {})
    usual, first = _actions(steps)
    if tokenizer.decoder_description is None:  # the library then joins the tokens with spaces
        usual = [lambda value: f" {value!s}"]
    tokens = [tokenizer.token(i) for i in range(size)]
    table = [b"" if token is None else _apply(usual, token) for token in tokens]
    other: dict[int, bytes] = {}
    for index, token in enumerate(tokens):
        if token is not None and (value := _apply(first, token)) != table[index]:
            other[index] = value
    return TokenBytes(table, other)


def _apply(actions: Sequence[Action], token: str) -> bytes:
    value: str | bytes = token
    for action in actions:
        value = action(value)
    return value if isinstance(value, bytes) else value.encode("utf-8")


def _actions(steps: Sequence[Mapping[str, Any]]) -> tuple[list[Action], list[Action]]:
    """What is done to a token, and what is done to the first one of a text."""
    usual: list[Action] = []
    first: list[Action] = []
    fused = has_bytes = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "ByteFallback" and not fused:
            has_bytes = True
            usual.append(_fall_back)
            first.append(_fall_back)
        elif kind == "Replace" and _replaces_token_by_token(step, fused, has_bytes):
            replace = partial(_replace, step["pattern"]["String"], step["content"])
            usual.append(replace)
            first.append(replace)
        elif kind == "Metaspace" and not (fused or has_bytes):
            mark, scheme = step["replacement"], step["prepend_scheme"]
            usual.append(partial(_replace, mark, " "))
            first.append(partial(_replace, mark, " " if scheme == "never" else ""))
        elif kind == "Strip" and fused and step["start"] <= 1 and not step["stop"]:
            first.append(partial(_strip, step["content"] * step["start"]))
        else:
            raise TokenizerError(
                f"the decoder of the tokenizer has the step {dict(step)}, after which the bytes of "
                f"a token do not follow from the token: {_EXPECTED}"
            )
    return usual, first


def _fall_back(value: str | bytes) -> str | bytes:
    assert isinstance(value, str)
    found = _BYTE.fullmatch(value)
    return value if found is None else bytes([int(found[1], 16)])


def _replace(old: str, new: str, value: str | bytes) -> str | bytes:
    if isinstance(value, bytes):  # one byte of a text
        return value.replace(old.encode(), new.encode())
    return value.replace(old, new)


def _strip(start: str, value: str | bytes) -> str | bytes:
    if isinstance(value, bytes):
        return value.removeprefix(start.encode())
    return value.removeprefix(start)


def _replaces_token_by_token(step: Mapping[str, Any], fused: bool, has_bytes: bool) -> bool:
    """Whether no match reaches from one token into another."""
    old = step["pattern"].get("String")
    if not old:
        return False
    return not (fused or has_bytes) or (len(old) == 1 and (old.isascii() or not has_bytes))

"""Special tokens as the configuration files of a model folder declare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tbo_jax.text.files import TokenizerError

_NAMES = frozenset(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_special_tokens(
    folder: Path, config: Mapping[str, Any], token_map: Mapping[str, Any]
) -> dict[str, str]:
    """Text of every token that `tokenizer_config.json` or `special_tokens_map.json` names.

    Args:
        folder: named in errors.
        config: contents of `tokenizer_config.json`.
        token_map: contents of `special_tokens_map.json`.

    Raises:
        TokenizerError: a token is neither null, nor a string, nor an object with "content".
    """
    sources = [("tokenizer_config.json", config), ("special_tokens_map.json", token_map)]
    if "added_tokens_decoder" in config:
        # Folders that list their added tokens in the config no longer depend on the older map.
        sources.reverse()
    found: dict[str, str] = {}
    for file, entries in sources:
        for name, value in entries.items():
            if name in _NAMES and value is not None:
                found[name] = _token_text(f"{folder / file}: {name}", value)
            elif name.endswith("_token") and isinstance(value, str | Mapping):
                # Tokens of one model, such as image_token; add_bos_token and its like are flags.
                found[name] = _token_text(f"{folder / file}: {name}", value)
    return found


def add_listed_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]
) -> None:
    """Adds the tokens of `added_tokens_decoder` that `tokenizer.json` lacks.

    Raises:
        TokenizerError: malformed, or a token's id is another one than declared.
    """
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    listed = config.get("added_tokens_decoder") or {}
    try:
        by_id = sorted((int(key), dict(entry)) for key, entry in listed.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError(f"{where}: expected an object of ids and tokens: {error}") from error
    for declared, entry in by_id:
        content = _token_text(f"{where}[{declared}]", entry)
        if backend.token_to_id(content) is None:
            flags = {key: bool(entry[key]) for key in _ADDED_TOKEN_FLAGS if key in entry}
            backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        actual = backend.token_to_id(content)
        if actual != declared:
            raise TokenizerError(
                f"{where}: {content!r} is declared with id {declared}, but tokenizer.json puts it "
                f"at id {actual}"
            )


def _token_text(where: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise TokenizerError(f'{where}: expected a str or {{"content": str}}, got {value!r:.80}')
    return text

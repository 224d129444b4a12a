"""Which token ids end a generated sequence, from the configuration files of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tbo_jax.text.files import TokenizerError, read_json_object
from tbo_jax.text.tokenizer import Tokenizer


def end_of_sequence_ids(folder: str | Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids after which a sequence is complete.

    The first of these that names any: `eos_token_id` of `generation_config.json`, `eos_token_id` of
    `config.json`, the tokenizer's `eos_token`. Empty where none does.

    Raises:
        TokenizerError: an `eos_token_id` is neither null, nor an id, nor a non-empty list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        value = (read_json_object(path) or {}).get("eos_token_id")
        if value is not None:
            return _ids(path, value)
    token_id = tokenizer.eos_token_id
    return frozenset() if token_id is None else frozenset({token_id})


def _ids(path: Path, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(item) is not int or item < 0 for item in ids):
        raise TokenizerError(
            f"{path}: eos_token_id: expected a token id or a non-empty list of token ids, "
            f"got {value!r:.80}"
        )
    return frozenset(ids)

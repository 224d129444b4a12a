"""Reading the small text and JSON files of a Hugging Face model folder, with precise errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer, a chat template or a token id list that cannot be used; the message says why."""


def read_text(path: Path) -> str | None:
    """Text of a UTF-8 file, or None where there is no such file.

    Raises:
        TokenizerError: the file cannot be read or is not UTF-8.
    """
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: expected a readable UTF-8 text file: {error}") from error


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Contents of a JSON file that holds one object, or None where there is no such file.

    Raises:
        TokenizerError: the file is unreadable, is not JSON, or holds something else than an object.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value

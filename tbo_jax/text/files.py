"""Reading the small text and JSON files of a Hugging Face model folder, with precise errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tbo_jax.host.json_files import parse_json_object


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
        TokenizerError: the file is unreadable, is not JSON, has a key twice, is nested too deeply,
            or holds something else than an object.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        return parse_json_object(text, str(path))
    except ValueError as error:
        raise TokenizerError(str(error)) from error

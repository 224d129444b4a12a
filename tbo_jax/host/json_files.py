"""Reads the JSON files of a model folder, each of which holds one object."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file cannot be read, or `parse_json_object` refuses what is in it.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes | str, what: str) -> dict[str, Any]:
    """The object that `raw` (UTF-8) holds; `what` says in an error where it is from.

    Raises:
        ValueError: it is not JSON, is nested too deeply, has a key twice, or is not an object.
    """
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{what}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected a JSON object, got {type(value).__name__}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {key!r} occurs {count} times")
    return value

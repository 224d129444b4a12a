"""Which texts a request allows, as a caller writes it. Host side only: this never loads JAX.

What is checked here needs no tokenizer: types, and that JSON is JSON. Whether a regular expression
or a schema can be followed is known when the request is added (`engine.structured`).
"""

from __future__ import annotations

import json
from typing import Any

from tbo_jax.host.json_files import parse_json_object

# The options of `SamplingParams` that say it, of which a request has one at most.
STRUCTURES = ("json_schema", "json_object", "regex", "grammar", "choice")
_JSON = "values of JSON: dict with texts as keys, list, str, finite float, int, bool, None"


def schema_text(schema: Any, what: str) -> str:
    """A JSON schema as text.

    Args:
        schema: a dict, or the JSON text of an object, which is kept as it is.
        what: its name in errors.

    Raises:
        ValueError: it is neither, holds what is not JSON, or has a key twice.
    """
    if isinstance(schema, str):
        checked_text(schema, what)
        parse_json_object(schema, what)
        return schema
    if not isinstance(schema, dict):
        raise ValueError(
            f"{what} is {schema!r:.80}; expected a dict, or the JSON text of an object"
        )
    try:
        text = json.dumps(schema, allow_nan=False)
        same = json.loads(text) == schema  # no tuple became a list, and no number the text of a key
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is {schema!r:.80}: {error}; expected {_JSON}") from None
    if not same:
        raise ValueError(f"{what} is {schema!r:.80}; expected {_JSON}")
    return text


def checked_text(text: Any, what: str) -> str:
    """`text`, if it is one, not empty, that can be written as UTF-8; else ValueError."""
    expected = "a non-empty text that can be written as UTF-8"
    if not isinstance(text, str) or not text:
        raise ValueError(f"{what} is {text!r:.80}; expected {expected}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is {text!r:.80}: {error.reason}; expected {expected}") from None
    return text

"""Random JSON schemas whose documents are short, however tokens are drawn."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ["^[a-c]{1,3}$", "^(yes|no)[0-9]?$", "^é[a-z0-9]{0,2}$", "^\\\\?x$", "^[^ab]{2}$", "^$"]
NAMES = ["a", "bc", "name", 'qu"ote', "é", "back\\slash", "tab\t", "", "the"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A nested schema, with rules for the spaces between."""
    spaces: dict[str, Any] = {"whitespace_flexible": False}
    if rng.random() < 0.4:
        spaces = {"whitespace_pattern": "[ \\n]{1,2}"}
    return {**_schema(rng, 3), "x-guidance": spaces}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _constant, _enum]
    if depth:
        kinds += [_object] * 4 + [_array] * 2 + [_any_of] * 2
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randrange(4)
    limits = {"minLength": low, "maxLength": low + rng.randrange(6)}
    if low and rng.random() < 0.3:  # somewhere in it
        limits["pattern"] = "[a-z0-9]"  # type: ignore[assignment]
    return {"type": "string", **limits}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.choice([-1000, -17, -1, 0, 3, 99, 10**6])
    high = low + rng.choice([0, 1, 8, 90, 12345])
    schema = {"type": "integer"}
    schema[rng.choice(["minimum", "exclusiveMinimum"])] = low - 1  # type: ignore[assignment]
    schema[rng.choice(["maximum", "exclusiveMaximum"])] = high + 1  # type: ignore[assignment]
    return schema


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "number"}
    low = rng.choice([-2.5, 0, 0.125, 10])
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 3, 100])}


def _constant(rng: random.Random, _: int) -> dict[str, Any]:
    values: list[Any] = [None, True, 0, -1.5, "", 'a"b\\', "é\n漢", [1, "x"], {"k": {"l": []}}]
    return rng.choice([{"const": rng.choice(values)}, {"type": "boolean"}, {"type": "null"}])


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    values: list[Any] = [
        "yes",
        "no",
        "",
        'say "no"',
        "漢",
        1,
        12,
        -3,
        2.5,
        True,
        None,
        [],
        {"a": 1},
    ]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["required"] = names
        schema["patternProperties"] = {"^x[0-9]{1,2}$": _schema(rng, 0)}
        schema["maxProperties"] = len(names) + 2
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    schema: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + rng.randrange(3)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, depth - 1)]
    return {**schema, "items": _schema(rng, depth - 1)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}

"""Checks that all configurations share."""

from __future__ import annotations

import operator
from typing import Any


def check_integer(name: str, value: Any, least: int) -> int:
    """`value` as an int; numpy's integers are taken.

    Raises:
        ValueError: it is no integer (True is none), or below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number

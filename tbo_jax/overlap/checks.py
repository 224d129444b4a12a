"""Checks of numbers that people give."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, least: int, hint: str = "") -> int:
    """The value of the argument `name` as an int.

    Integers of numpy will do; a bool, a float or a string is a mistake, whatever its value. `hint`
    ends the message.

    Raises:
        ValueError: it is no integer, or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be an integer from {least}, got {value!r}{hint}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}{hint}")
    return number

"""Where JSON that comes letter by letter opens and closes its brackets."""

from __future__ import annotations


class Nesting:
    """How deep a text in JSON is in brackets; those inside its strings do not count."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, letter: str) -> bool:
        """Take the next letter; whether it was a bracket, which `depth` has counted."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
            return False
        if letter == '"':
            self._in_string = True
        elif letter in "{[":
            self.depth += 1
        elif letter in "}]":
            self.depth -= 1
        return letter in "{[}]"

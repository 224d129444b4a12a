"""Calls of tools that structured output makes sure of: the whole text is JSON."""

from __future__ import annotations

import json

from tbo_jax.server.deltas import Delta
from tbo_jax.server.nesting import Nesting


class ForcedCall:
    """The text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Delta]:
        """The call before its first text, and the text as it is."""
        if not text:
            return []
        deltas = [] if self._name is None else [Delta("call", self._name)]
        self._name = None
        return [*deltas, Delta("arguments", text)]

    def finish(self) -> list[Delta]:
        """Nothing: nothing is held back."""
        return []


class ForcedCalls:
    """The text is an array of {"name": ..., "arguments": {...}}, in this order."""

    def __init__(self) -> None:
        self._text = ""
        self._nesting = Nesting()
        self._from = 0  # where the arguments of the call begin that are not told yet
        self._object = 0  # where the call begins
        self._in_arguments = False

    def push(self, text: str) -> list[Delta]:
        """The calls whose name is known, and their arguments as far as they go."""
        deltas: list[Delta] = []
        for at, letter in enumerate(text, len(self._text)):
            self._text += letter
            deltas += self._take(letter, at)
        if self._in_arguments:
            deltas += self._told(len(self._text))
        return deltas

    def _take(self, letter: str, at: int) -> list[Delta]:
        if not self._nesting.take(letter):
            return []
        depth = self._nesting.depth
        if letter == "{":
            if depth == 2:
                self._object = at
            elif depth == 3 and not self._in_arguments:
                before = self._text[self._object : at].rstrip().removesuffix(":").rstrip()
                before = before.removesuffix('"arguments"').rstrip().removesuffix(",")
                self._in_arguments, self._from = True, at
                return [Delta("call", json.loads(before + "}")["name"])]
        elif letter == "}" and depth == 2 and self._in_arguments:
            told = self._told(at + 1)
            self._in_arguments = False
            return told
        return []

    def _told(self, until: int) -> list[Delta]:
        text, self._from = self._text[self._from : until], until
        return [Delta("arguments", text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing: nothing is held back."""
        return []

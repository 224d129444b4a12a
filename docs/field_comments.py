"""For the reference: a comment beside or above a field of a dataclass describes it."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

BESIDE = re.compile(r"\s# (.+)$")
ABOVE = re.compile(r"^\s*# (.+)$")


class FieldComments(griffe.Extension):
    """Gives fields that have a comment and no docstring that comment."""

    def on_attribute_instance(
        self, *, node: ast.AST, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        if attr.docstring is not None or attr.lineno is None or not attr.parent.is_class:
            return
        lines = attr.lines_collection[attr.filepath]
        found = BESIDE.search(lines[attr.lineno - 1])
        comment = [found[1]] if found else []
        number = attr.lineno - 2
        while not found and (above := ABOVE.match(lines[number])):
            comment.insert(0, above[1])
            number -= 1
        if comment:
            text = " ".join(comment)
            attr.docstring = griffe.Docstring(text[:1].upper() + text[1:] + ".", parent=attr)

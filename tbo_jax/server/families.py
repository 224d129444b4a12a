"""Families of models: how each writes what it thinks and the tools that it calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tbo_jax.server.protocol import ChatRequest

if TYPE_CHECKING:
    from tbo_jax.server.tool_choice import Parsing


@dataclass(frozen=True)
class Families:
    calls: str | None = None
    reasoning: str | None = None

    def parsing(self, body: ChatRequest, calls: bool) -> Parsing:
        from tbo_jax.server.tool_choice import Parsing

        return Parsing()

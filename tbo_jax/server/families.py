"""Families of models: how each writes what it thinks, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tbo_jax.host.json_files import read_json_object
from tbo_jax.server.deltas import ChatParser, PlainParser
from tbo_jax.server.harmony import HarmonyParser
from tbo_jax.server.tags import CALL_FORMS, TagParser

HARMONY = "harmony"
OFF = "none"
CALLS = (*CALL_FORMS, HARMONY, OFF)
REASONING = ("think", HARMONY, OFF)
_OF_TYPE = {  # model_type of config.json: calls, reasoning
    "qwen2": ("hermes", OFF),
    "qwen2_moe": ("hermes", OFF),
    "qwen3": ("hermes", "think"),
    "qwen3_moe": ("hermes", "think"),
    "deepseek_v2": ("deepseek", OFF),
    "deepseek_v3": ("deepseek", "think"),
    "glm4_moe": ("glm", "think"),
    "kimi_k2": ("kimi", "think"),
    "ernie4_5": ("ernie", "think"),
    "ernie4_5_moe": ("ernie", "think"),
    "gpt_oss": (HARMONY, HARMONY),
}


@dataclass(frozen=True)
class Families:
    """The parsers of a model, by name; "none" for none."""

    calls: str = OFF
    reasoning: str = OFF

    @classmethod
    def of(cls, folder: str, calls: str | None, reasoning: str | None) -> Families:
        """Those of the model in a folder, unless others are given.

        Raises:
            ValueError: there is none of that name.
        """
        for option, name, known in (
            ("--tool-call-parser", calls, CALLS),
            ("--reasoning-parser", reasoning, REASONING),
        ):
            if name is not None and name not in known:
                expected = ", ".join(known)
                raise ValueError(f"{option} is {name!r}: expected one of {expected}")
        model_type = read_json_object(Path(folder) / "config.json").get("model_type")
        of_type = _OF_TYPE.get(str(model_type), (OFF, OFF))
        return cls(calls or of_type[0], reasoning or of_type[1])

    def maker(self, schemas: Mapping[str, Any] | None) -> Callable[[bool], ChatParser]:
        """What makes a parser, told whether the prompt has begun a thought.

        Args:
            schemas: of the arguments of the functions that may be called; None: none may.
        """
        if HARMONY in (self.calls, self.reasoning):
            return lambda starts_thinking: HarmonyParser(schemas is not None)
        form = None if schemas is None else CALL_FORMS.get(self.calls)
        thinks = self.reasoning == "think"
        if form is None and not thinks:
            return lambda starts_thinking: PlainParser()
        return lambda starts_thinking: TagParser(
            thinks=thinks, starts_thinking=starts_thinking, form=form, schemas=schemas
        )

    def needs_special_tokens(self, has_calls: bool) -> bool:
        """Whether marks are special tokens, so that these have to have text."""
        form = CALL_FORMS.get(self.calls)
        of_calls = has_calls and form is not None and form.special
        return of_calls or HARMONY in (self.calls, self.reasoning)

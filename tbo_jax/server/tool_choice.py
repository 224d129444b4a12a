"""Which parser a chat's text needs, and what `tool_choice` allows the model to write."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tbo_jax.server.deltas import ChatParser, PlainParser
from tbo_jax.server.errors import refused
from tbo_jax.server.families import OFF, Families
from tbo_jax.server.forced_calls import ForcedCall, ForcedCalls
from tbo_jax.server.options import is_structured
from tbo_jax.server.protocol import ChatRequest, NamedTool


@dataclass(frozen=True)
class Parsing:
    """How a chat's text becomes a message.

    Attributes:
        make: a parser for one completion, told whether the prompt has begun a thought.
        looks_at_prompt: whether that matters.
        shows_tools: whether the template sees the tools.
        options: of `SamplingParams`, for the parser to have what it looks for.
    """

    make: Callable[[bool], ChatParser] = lambda starts_thinking: PlainParser()
    looks_at_prompt: bool = False
    shows_tools: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def parsing_of(body: ChatRequest, families: Families) -> Parsing:
    """The parsing of a chat.

    Raises:
        ApiError: 400: `tool_choice` does not go with the tools or the model.
    """
    tools = {tool.function.name: tool.function for tool in body.tools or ()}
    choice = body.tool_choice or ("auto" if tools else "none")
    if not tools and choice not in ("none", "auto"):
        raise refused("tool_choice", "needs tools")
    if choice in ("none", "auto"):
        calls = choice == "auto" and bool(tools)
        if calls and families.calls == OFF:
            raise refused(
                "tools",
                "with tool_choice auto need a model whose form of calls is known: start the server "
                "with --tool-call-parser, or ask for tool_choice required",
            )
        if is_structured(body):  # the whole text is what was asked for
            return Parsing(shows_tools=calls)
        schemas = {name: _parameters(function) for name, function in tools.items()}
        special = families.needs_special_tokens(calls)
        return Parsing(
            families.maker(schemas if calls else None),
            families.reasoning == "think",
            calls,
            {"skip_special_tokens": False} if special else {},
        )
    if is_structured(body):
        raise refused("tool_choice", "that asks for a call goes with no other structured output")
    if isinstance(choice, NamedTool):
        if choice.function.name not in tools:
            raise refused("tool_choice.function.name", f"is {choice.function.name!r:.80}: no tool")
        schema: Any = _parameters(tools[choice.function.name])
        name = choice.function.name
        options = {"json_schema": json.dumps(schema)}
        return Parsing(lambda _: ForcedCall(name), shows_tools=True, options=options)
    one_of = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _parameters(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, function in tools.items()
    ]
    schema = {"type": "array", "items": {"anyOf": one_of}, "minItems": 1}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    options = {"json_schema": json.dumps(schema)}
    return Parsing(lambda _: ForcedCalls(), shows_tools=True, options=options)


def _parameters(function: Any) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}

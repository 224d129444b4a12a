"""Messages and tools of a body, as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tbo_jax.server.errors import refused
from tbo_jax.server.protocol import ChatMessage, ContentPart, Tool

_TEXTS = ("text", "input_text", "output_text")


class TextPart(Protocol):
    """A part of a content, which is of a text if `type` says so."""

    @property
    def type(self) -> str:
        """What it is."""

    @property
    def text(self) -> str | None:
        """The text, if it has one."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages, of which a "developer" is a "system", as templates know no other.

    Raises:
        ApiError: 400: a part that is no text, or arguments of a call that are no JSON object.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": _content(message.content, where)}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        entry["reasoning_content"] = reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call_arguments(
                        call.function.arguments, f"{where}.tool_calls[{i}].function.arguments"
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    elif message.content is None:
        raise refused(f"{where}.content", "is missing", "missing_required_parameter")
    return entry


def _content(content: str | list[ContentPart] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        is_refusal = part.type == "refusal"
        at = f"{where}.content[{number}]"
        texts.append(part.refusal or "" if is_refusal else part_text(part, at, _TEXTS))
    return "".join(texts)


def part_text(part: TextPart, where: str, types: Sequence[str]) -> str:
    """The text of a part of a content.

    Raises:
        ApiError: 400: it is of none of the types, or has no text; it names `where` it is.
    """
    if part.type not in types or part.text is None:
        raise refused(where, f"is of type {part.type!r:.80}: expected a text", "unsupported_value")
    return part.text


def call_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call: templates write them as JSON themselves.

    Raises:
        ApiError: 400: they are no JSON object; it names `where` they are in the body.
    """
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refused(where, f"is {text!r:.80}: expected a JSON object: {error}") from None


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools; None for none."""
    if not tools:
        return None
    listed = []
    for tool in tools:
        function = {"name": tool.function.name, "description": tool.function.description or ""}
        parameters = tool.function.parameters or {"type": "object", "properties": {}}
        listed.append({"type": "function", "function": {**function, "parameters": parameters}})
    return listed

"""The input of `/v1/responses` as chat templates and tool parsers take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tbo_jax.server.conversation import call_arguments, part_text
from tbo_jax.server.errors import refused
from tbo_jax.server.protocol import (
    ChatRequest,
    FunctionTool,
    InputItem,
    InputPart,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ResponseNamedTool,
    ResponsesRequest,
    Tool,
)

_TEXTS = ("input_text", "output_text", "text", "reasoning_text")


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """A chat with the same tools and structure, and no messages.

    Raises:
        ApiError: 400: the tool that is to be called is none of the tools.
    """
    choice: Any = body.tool_choice
    if isinstance(choice, ResponseNamedTool):
        if choice.name not in [tool.name for tool in body.tools or ()]:
            raise refused("tool_choice.name", f"is {choice.name!r:.80}: no tool")
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    tools = [
        Tool(
            type="function",
            function=FunctionTool(
                name=tool.name, description=tool.description, parameters=tool.parameters
            ),
        )
        for tool in body.tools or ()
    ]
    asked = body.text.format if body.text is not None else None
    return ChatRequest(
        messages=[],
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None
        if asked is None
        else ResponseFormat(type=asked.type, json_schema=JsonSchemaFormat(schema=asked.schema)),
    )


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages, as templates take them. Thoughts and calls are part of an assistant's.

    Raises:
        ApiError: 400: an item is missing, or of a kind that is not known.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise refused("input", "is empty: expected a text, or one message or more")
    for number, item in enumerate(body.input):
        _put(messages, item, f"input[{number}]")
    return messages


def _put(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    if item.type == "function_call":
        call = {
            "id": _given(item.call_id, f"{where}.call_id"),
            "type": "function",
            "function": {
                "name": _given(item.name, f"{where}.name"),
                "arguments": call_arguments(item.arguments or "", f"{where}.arguments"),
            },
        }
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        call_id = _given(item.call_id, f"{where}.call_id")
        content = _text(_given(item.output, f"{where}.output"), f"{where}.output")
        messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
    elif item.type == "reasoning":
        text = _text(item.content, f"{where}.content")
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif item.type == "message" and item.role is not None:
        text = _text(item.content, f"{where}.content")
        if item.role == "assistant":
            last = messages[-1] if messages else {}
            if last.get("content") != "" or "reasoning_content" not in last or "tool_calls" in last:
                messages.append(last := {"role": "assistant"})
            last["content"] = text
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text})
    else:
        raise refused(
            where,
            f"is of type {item.type!r:.80}: expected a message with a role, function_call, "
            "function_call_output or reasoning",
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that a call is part of: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _given(value: Any, where: str) -> Any:
    if value is None:
        raise refused(where, "is missing", "missing_required_parameter")
    return value


def _text(content: str | Sequence[InputPart] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = enumerate(content or ())
    return "".join(part_text(part, f"{where}[{number}]", _TEXTS) for number, part in parts)

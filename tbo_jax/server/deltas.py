"""What a chat's text is made of: content, what the model thinks, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an assistant's message.

    Attributes:
        kind: "content", "reasoning", "call" (a call begins), or "arguments" (of the last call).
        text: of the content or the arguments; of "call" the name of the function.
        call_id: of a call, where the model gives one.
    """

    kind: str
    text: str
    call_id: str | None = None


class ChatParser(Protocol):
    """Turns the text of a completion into deltas. However it is cut, joined they are the same."""

    def push(self, text: str) -> list[Delta]:
        """The deltas that are certain with some more text."""

    def finish(self) -> list[Delta]:
        """Those of what was held back."""


class PlainParser:
    """All is content."""

    def push(self, text: str) -> list[Delta]:
        """The text as it is."""
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing: nothing is held back."""
        return []


def joined(deltas: list[Delta]) -> list[Delta]:
    """The same with neighbours of one kind as one."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if last is not None and last.kind == delta.kind != "call":
            result[-1] = Delta(last.kind, last.text + delta.text, last.call_id)
        elif delta.text or delta.kind == "call":
            result.append(delta)
    return result


@dataclass(slots=True)
class Message:
    """An assistant's message, as its deltas add up."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, delta: Delta, call_id: str) -> None:
        """Add a delta; `call_id` is for a call that has none."""
        if delta.kind == "content":
            self.content.append(delta.text)
        elif delta.kind == "reasoning":
            self.reasoning.append(delta.text)
        elif delta.kind == "call":
            function = {"name": delta.text, "arguments": ""}
            call = {"id": delta.call_id or call_id, "type": "function", "function": function}
            self.calls.append(call)
        else:
            self.calls[-1]["function"]["arguments"] += delta.text

    def form(self) -> dict[str, Any]:
        """In OpenAI's form."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
            message["content"] = content or None
        return message

"""The output items of `/v1/responses`: messages, what the model thinks, and calls of functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tbo_jax.server.deltas import Delta
from tbo_jax.server.service import new_id

Event = tuple[str, dict[str, Any]]  # type and fields

_KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call"}


class OutputItems:
    """Items as the deltas of a text add up to them, and the events that tell of it.

    Attributes:
        items: in OpenAI's form; the last may be under way.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the item under way

    def push(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta."""
        kind = _KINDS.get(delta.kind)
        if kind is not None and (delta.kind == "call" or self._kind != kind):
            yield from self.close("completed")
            yield from self._open(kind, delta)
        if delta.kind == "call" or not delta.text:
            return
        self._texts.append(delta.text)
        yield f"{self._told_as}.delta", {**self._place, "delta": delta.text, **self._logprobs}

    def finish(self, status: str) -> Iterator[Event]:
        """The events of the end; a text of nothing is a message, too."""
        if not self.items:
            yield from self._open("message", Delta("content", ""))
        yield from self.close(status)

    def reasoning(self) -> str:
        """All that the model thought."""
        found = [item["content"] for item in self.items if item["type"] == "reasoning"]
        return "".join(part["text"] for content in found for part in content)

    @property
    def _kind(self) -> str | None:
        if not self.items or self.items[-1]["status"] != "in_progress":
            return None
        kind: str = self.items[-1]["type"]
        return kind

    @property
    def _told_as(self) -> str:
        """How the events of the text of the item under way are called."""
        return {
            "message": "response.output_text",
            "reasoning": "response.reasoning_text",
            "function_call": "response.function_call_arguments",
        }[self.items[-1]["type"]]

    @property
    def _place(self) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == "function_call" else place | {"content_index": 0}

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.items[-1]["type"] == "message" else {}

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _open(self, kind: str, delta: Delta) -> Iterator[Event]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            call_id = delta.call_id or new_id("call")
            item |= {"id": new_id("fc"), "call_id": call_id, "name": delta.text, "arguments": ""}
        elif kind == "reasoning":
            item |= {"id": new_id("rs"), "summary": [], "content": []}
        else:
            item |= {"id": new_id("msg"), "role": "assistant", "content": []}
        self.items.append(item)
        added = {"output_index": len(self.items) - 1, "item": {**item}}
        yield "response.output_item.added", added
        if kind != "function_call":
            yield "response.content_part.added", {**self._place, "part": self._part("")}

    def close(self, status: str) -> Iterator[Event]:
        """End the item under way, if there is one, as "completed" or "incomplete"."""
        if self._kind is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        self._texts = []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {**self._place, "name": item["name"], "arguments": text}
            yield f"{self._told_as}.done", done
        else:
            part = self._part(text)
            item["content"] = [part]
            yield f"{self._told_as}.done", {**self._place, "text": text, **self._logprobs}
            yield "response.content_part.done", {**self._place, "part": part}
        done = {"output_index": len(self.items) - 1, "item": item}
        yield "response.output_item.done", done

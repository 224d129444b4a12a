"""`/v1/responses`: text in and out. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.responses import Response

from tbo_jax.server.deltas import ChatParser, PlainParser
from tbo_jax.server.errors import ApiError, json_response, refused
from tbo_jax.server.interface import Update
from tbo_jax.server.options import bounded, make_params
from tbo_jax.server.protocol import InputItem, ResponsesRequest
from tbo_jax.server.runs import Counts, Run, started
from tbo_jax.server.service import Service, new_id
from tbo_jax.server.streams import EventStream, event
from tbo_jax.server.tags import TAIL, THINK

_TEXTS = ("input_text", "output_text", "text")


class ResponseJob:
    """One request of `/v1/responses`."""

    def __init__(self, service: Service, body: ResponsesRequest, salt: str) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        self._id = new_id("resp")
        self._item = new_id("msg")
        self._created = int(time.time())
        self._counts = Counts()
        self._number = -1  # of the last event
        self._parser: ChatParser = PlainParser()
        self._run: Run

    async def answer(self, request_id: str) -> Response:
        """Run it, and answer.

        Raises:
            ApiError: something is refused or fails.
        """
        body, service = self._body, self._service
        service.check_model(body.model)
        if body.text is not None and body.text.verbosity is not None:
            raise refused("text.verbosity", "is not supported", "unsupported_parameter")
        if body.max_output_tokens is not None and body.max_output_tokens < 1:
            raise refused("max_output_tokens", f"is {body.max_output_tokens}: expected 1 or more")
        prompt = await service.prompts.encode_chat(self._messages(), None, None)
        room = service.room_for(prompt)
        most = body.max_output_tokens
        if most is None:
            most = service.defaults.values.get("max_new_tokens", room)
        given = {"temperature": body.temperature, "top_p": body.top_p}
        given = {name: value for name, value in given.items() if value is not None}
        structure = self._structure()
        if not structure:
            self._parser = await self._parser_for(prompt)
            if service.families.needs_special_tokens(False):
                given["skip_special_tokens"] = False
        params = make_params(
            given | structure | {"max_new_tokens": min(most, room)}, service.defaults
        )
        self._run = Run(request_id, [prompt], [params], self._salt, 0, bool(body.stream))
        stack = AsyncExitStack()
        updates = await stack.enter_async_context(started(service, self._run, self._counts))
        if body.stream:
            return EventStream(self._events(stack, updates), stack.aclose, self._failed)
        async with stack:
            texts, reason = [], None
            async for _, update in updates:
                texts.append(self._content(update))
                reason = update.finish_reason
        return json_response(self._form("".join(texts), reason))

    async def _parser_for(self, prompt: list[int]) -> ChatParser:
        families = self._service.families
        tail = await self._service.prompts.decode(prompt[-TAIL:])
        return families.maker(None)(tail.rstrip().endswith(THINK[0]))

    def _content(self, update: Update) -> str:
        """What an update adds to the answer: what the model thinks is no part of it."""
        deltas = self._parser.push(update.text)
        if update.finish_reason is not None:
            deltas += self._parser.finish()
        return "".join(delta.text for delta in deltas if delta.kind == "content")

    def _messages(self) -> list[dict[str, Any]]:
        body = self._body
        messages: list[dict[str, Any]] = []
        if body.instructions is not None:
            messages.append({"role": "system", "content": body.instructions})
        if isinstance(body.input, str):
            return [*messages, {"role": "user", "content": body.input}]
        if not body.input:
            raise refused("input", "is empty: expected a text, or one message or more")
        return messages + [_message(item, f"input[{i}]") for i, item in enumerate(body.input)]

    def _structure(self) -> dict[str, Any]:
        asked = None if self._body.text is None else self._body.text.format
        if asked is None or asked.type == "text":
            return {}
        if asked.type == "json_object":
            return {"json_object": True}
        if asked.schema is None:
            raise refused("text.format.schema", "is missing")
        return bounded({"json_schema": msgspec.json.encode(asked.schema).decode()})

    async def _events(
        self, stack: AsyncExitStack, updates: AsyncIterator[tuple[int, Update]]
    ) -> AsyncIterator[bytes]:
        at = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._form("", None))
        yield self._event("response.in_progress", response=self._form("", None))
        item = self._message("", "in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **at, part=_part(""))
        texts, reason = [], None
        async with stack:
            async for _, update in updates:
                if text := self._content(update):
                    texts.append(text)
                    yield self._event("response.output_text.delta", **at, delta=text, logprobs=[])
                reason = update.finish_reason
        text = "".join(texts)
        whole = self._form(text, reason)
        yield self._event("response.output_text.done", **at, text=text, logprobs=[])
        yield self._event("response.content_part.done", **at, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _failed(self, error: ApiError) -> bytes:
        form = self._form("", None) | {"status": "failed"}
        form["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=form)

    def _message(self, text: str, status: str, content: list[Any] | None = None) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)] if content is None else content,
        }

    def _form(self, text: str, reason: str | None) -> dict[str, Any]:
        """The response: under way where there is no reason why it ended."""
        body = self._body
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        asked = body.text.format if body.text is not None else None
        form: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._service.names[0],
            "output": [],
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if asked is None else _format(asked)},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        if reason is not None:
            prompt, generated = self._run.prompt_tokens, self._counts.generated
            form["output"] = [self._message(text, status)]
            form["usage"] = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": self._counts.cached},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + generated,
            }
        return form


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(asked: Any) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(asked).items() if value is not None}


def _message(item: InputItem, where: str) -> dict[str, Any]:
    if item.type != "message" or item.role is None:
        raise refused(where, f"is of type {item.type!r:.80}: expected a message with a role")
    role = "system" if item.role == "developer" else item.role
    if isinstance(item.content, str):
        return {"role": role, "content": item.content}
    texts = []
    for number, part in enumerate(item.content or ()):
        if part.type not in _TEXTS or part.text is None:
            at = f"{where}.content[{number}]"
            raise refused(at, f"is of type {part.type!r:.80}: expected a text", "unsupported_value")
        texts.append(part.text)
    return {"role": role, "content": "".join(texts)}

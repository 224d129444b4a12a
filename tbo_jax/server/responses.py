"""`/v1/responses`: text, thoughts and calls of functions. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.responses import Response

from tbo_jax.server.conversation import template_tools
from tbo_jax.server.deltas import ChatParser
from tbo_jax.server.errors import ApiError, json_response, refused
from tbo_jax.server.interface import Update
from tbo_jax.server.options import bounded, make_params
from tbo_jax.server.protocol import ResponsesRequest
from tbo_jax.server.response_input import as_chat, messages_of
from tbo_jax.server.response_items import Event, OutputItems
from tbo_jax.server.runs import Counts, Run, started
from tbo_jax.server.service import Service, new_id
from tbo_jax.server.streams import EventStream, event
from tbo_jax.server.tags import TAIL, THINK
from tbo_jax.server.tool_choice import parsing_of


class ResponseJob:
    """One request of `/v1/responses`."""

    def __init__(self, service: Service, body: ResponsesRequest, salt: str) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        self._id = new_id("resp")
        self._created = int(time.time())
        self._counts = Counts()
        self._number = -1  # of the last event
        self._items = OutputItems()
        self._thoughts = 0  # tokens of them
        self._parser: ChatParser
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
        chat = as_chat(body)
        parsing = parsing_of(chat, service.families)
        arguments: dict[str, Any] = {}
        if body.reasoning is not None:
            if body.reasoning.summary is not None:
                raise refused("reasoning.summary", "is not supported", "unsupported_parameter")
            if body.reasoning.effort is not None:
                arguments["reasoning_effort"] = body.reasoning.effort
        tools = template_tools(chat.tools) if parsing.shows_tools else None
        prompt = await service.prompts.encode_chat(messages_of(body), tools, arguments)
        room = service.room_for(prompt)
        most = body.max_output_tokens
        if most is None:
            most = service.defaults.values.get("max_new_tokens", room)
        given = {"temperature": body.temperature, "top_p": body.top_p}
        given = {name: value for name, value in given.items() if value is not None}
        thinks = parsing.looks_at_prompt and await self._starts_thinking(prompt)
        self._parser = parsing.make(thinks)
        given |= self._structure() | parsing.options | {"max_new_tokens": min(most, room)}
        params = make_params(given, service.defaults)
        self._run = Run(request_id, [prompt], [params], self._salt, 0, bool(body.stream))
        stack = AsyncExitStack()
        updates = await stack.enter_async_context(started(service, self._run, self._counts))
        if body.stream:
            return EventStream(self._events(stack, updates), stack.aclose, self._failed)
        async with stack:
            reason = None
            async for _, update in updates:
                for _ in self._take(update):
                    pass
                reason = update.finish_reason
        await self._count_thoughts()
        return json_response(self._form(reason))

    async def _starts_thinking(self, prompt: list[int]) -> bool:
        """Whether a prompt has begun a thought."""
        tail = await self._service.prompts.decode(prompt[-TAIL:])
        return tail.rstrip().endswith(THINK[0])

    def _take(self, update: Update) -> Iterator[Event]:
        """What an update adds to the items, as events."""
        deltas = self._parser.push(update.text)
        if update.finish_reason is not None:
            deltas += self._parser.finish()
        for delta in deltas:
            yield from self._items.push(delta)
        if update.finish_reason is not None:
            yield from self._items.finish(_status(update.finish_reason))

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
        yield self._event("response.created", response=self._form(None))
        yield self._event("response.in_progress", response=self._form(None))
        reason = None
        async with stack:
            async for _, update in updates:
                for kind, fields in self._take(update):
                    yield self._event(kind, **fields)
                reason = update.finish_reason
        await self._count_thoughts()
        whole = self._form(reason)
        yield self._event(f"response.{whole['status']}", response=whole)

    async def _count_thoughts(self) -> None:
        """Count the tokens of what the model thought."""
        if text := self._items.reasoning():
            self._thoughts = len(await self._service.prompts.encode(text, False))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _failed(self, error: ApiError) -> bytes:
        form = self._form(None) | {"status": "failed"}
        form["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=form)

    def _form(self, reason: str | None) -> dict[str, Any]:
        """The response: under way where there is no reason why it ended."""
        body = self._body
        status = _status(reason)
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if asked is None else _given(asked)},
            "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
            "tools": [_given(tool) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        if reason is not None:
            prompt, generated = self._run.prompt_tokens, self._counts.generated
            form["output"] = self._items.items
            form["usage"] = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": self._counts.cached},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": self._thoughts},
                "total_tokens": prompt + generated,
            }
        return form


def _status(reason: str | None) -> str:
    return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")


def _given(asked: Any) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(asked).items() if value is not None}

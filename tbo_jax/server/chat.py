"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response

from tbo_jax.server.conversation import template_messages, template_tools
from tbo_jax.server.deltas import ChatParser, Delta, Message
from tbo_jax.server.errors import json_response, refused
from tbo_jax.server.interface import Update
from tbo_jax.server.options import sampling_params
from tbo_jax.server.protocol import ChatRequest
from tbo_jax.server.runs import Counts, Run, started
from tbo_jax.server.service import Service, new_id, usage
from tbo_jax.server.streams import DONE, EventStream, TextEvents, event
from tbo_jax.server.tags import TAIL, THINK
from tbo_jax.server.token_texts import chat_logprobs
from tbo_jax.server.tool_choice import Parsing, parsing_of


class ChatJob:
    """One request of `/v1/chat/completions`."""

    def __init__(self, service: Service, body: ChatRequest, salt: str) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._counts = Counts()
        self._run: Run
        self._parsing: Parsing
        self._starts_thinking = False
        self._num_calls: dict[int, int] = {}  # of each completion of a stream

    async def answer(self, request_id: str) -> Response:
        """Run it, and answer.

        Raises:
            ApiError: something is refused or fails.
        """
        body, service = self._body, self._service
        service.check_model(body.model)
        logprobs = self._check()
        self._parsing = parsing_of(body, service.families)
        arguments = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", body.reasoning_effort)
        prompt = await service.prompts.encode_chat(
            template_messages(body.messages),
            template_tools(body.tools) if self._parsing.shows_tools else None,
            arguments,
            body.add_generation_prompt,
        )
        if self._parsing.looks_at_prompt:
            tail = await service.prompts.decode(prompt[-TAIL:])
            self._starts_thinking = tail.rstrip().endswith(THINK[0])
        room = service.room_for(prompt)
        most = body.max_completion_tokens
        most = body.max_tokens if most is None else most
        if most is None:
            most = service.defaults.values.get("max_new_tokens", room)
        params = sampling_params(
            body,
            service.defaults,
            max_new_tokens=min(most, room),
            n=body.n,
            logprobs=logprobs,
            **self._parsing.options,
        )
        self._run = Run(
            request_id, [prompt], [params], self._salt, body.priority or 0, bool(body.stream)
        )
        stack = AsyncExitStack()
        updates = await stack.enter_async_context(started(service, self._run, self._counts))
        if body.stream:
            return EventStream(self._events(stack, updates), stack.aclose)
        async with stack:
            return await self._whole(updates)

    def _check(self) -> int | None:
        """How many log-probabilities are told."""
        body = self._body
        if not body.messages:
            raise refused("messages", "is empty: expected one message or more")
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options", "needs stream")
        for name in ("max_completion_tokens", "max_tokens"):
            value = getattr(body, name)
            if value is not None and value < 1:
                raise refused(name, f"is {value}: expected 1 or more")
        if body.top_logprobs is not None:
            if not body.logprobs:
                raise refused("top_logprobs", "needs logprobs")
            if body.top_logprobs < 0:
                raise refused("top_logprobs", f"is {body.top_logprobs}: expected 0 or more")
        return (body.top_logprobs or 0) if body.logprobs else None

    def _parser(self) -> ChatParser:
        return self._parsing.make(self._starts_thinking)

    async def _whole(self, updates: AsyncIterator[tuple[int, Update]]) -> Response:
        count = self._run.num_choices
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[Any]] = [[] for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async for number, update in updates:
            texts[number].append(update.text)
            if update.logprobs is not None:
                logprobs[number] += chat_logprobs(update.logprobs, self._service.texts)
            if update.finish_reason is not None:
                reasons[number] = update.finish_reason
        choices = []
        for number in range(count):
            parser, message = self._parser(), Message()
            for delta in (*parser.push("".join(texts[number])), *parser.finish()):
                if delta.kind != "reasoning" or self._body.include_reasoning:
                    message.add(delta, new_id("call"))
            choices.append(
                {
                    "index": number,
                    "message": message.form(),
                    "logprobs": {"content": logprobs[number], "refusal": None}
                    if self._body.logprobs
                    else None,
                    "finish_reason": self._reason(reasons[number], bool(message.calls)),
                }
            )
        return json_response(self._body_of("chat.completion", choices) | {"usage": self._usage()})

    async def _events(
        self, stack: AsyncExitStack, updates: AsyncIterator[tuple[int, Update]]
    ) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        parsers = [self._parser() for _ in range(self._run.num_choices)]
        more: dict[str, Any] = {"usage": None} if with_usage else {}
        plain = [
            TextEvents(self._chunk(number, {"content": TextEvents.PLACE}) | more)
            for number in range(len(parsers))
        ]
        async with stack:
            for number in range(len(parsers)):
                first = {"role": "assistant", "content": ""}
                yield event(self._chunk(number, first) | more)
            async for number, update in updates:
                deltas = parsers[number].push(update.text)
                if update.finish_reason is not None:
                    deltas += parsers[number].finish()
                logprobs = None
                if update.logprobs:
                    known = chat_logprobs(update.logprobs, self._service.texts)
                    logprobs = {"content": known, "refusal": None}
                if always:
                    more = {"usage": self._usage()}
                for delta in deltas:
                    if delta.kind == "content" and logprobs is None and not always:
                        yield plain[number].of(delta.text)
                    elif delta.kind != "reasoning" or self._body.include_reasoning:
                        form = self._form(number, delta)
                        yield event(self._chunk(number, form, logprobs) | more)
                        logprobs = None
                if update.finish_reason is not None or logprobs is not None:
                    calls = bool(self._num_calls.get(number))
                    reason = self._reason(update.finish_reason, calls)
                    yield event(self._chunk(number, {}, logprobs, reason) | more)
        if with_usage:
            yield event(self._body_of("chat.completion.chunk", []) | {"usage": self._usage()})
        yield DONE

    def _form(self, number: int, delta: Delta) -> dict[str, Any]:
        """A delta in OpenAI's form."""
        if delta.kind == "content":
            return {"content": delta.text}
        if delta.kind == "reasoning":
            return {"reasoning_content": delta.text}
        if delta.kind == "call":
            index = self._num_calls.get(number, 0)
            self._num_calls[number] = index + 1
            call: dict[str, Any] = {"index": index, "id": delta.call_id or new_id("call")}
            call |= {"type": "function", "function": {"name": delta.text, "arguments": ""}}
        else:
            index = self._num_calls[number] - 1
            call = {"index": index, "function": {"arguments": delta.text}}
        return {"tool_calls": [call]}

    def _reason(self, reason: str | None, has_calls: bool) -> str | None:
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._body_of("chat.completion.chunk", [choice])

    def _body_of(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.names[0],
            "choices": choices,
        }

    def _usage(self) -> dict[str, object]:
        return usage(self._run.prompt_tokens, self._counts.generated, self._counts.cached)

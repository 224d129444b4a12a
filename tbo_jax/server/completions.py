"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from tbo_jax.server.errors import json_response, refused
from tbo_jax.server.interface import Update
from tbo_jax.server.options import sampling_params
from tbo_jax.server.protocol import CompletionRequest
from tbo_jax.server.runs import Counts, Run, started
from tbo_jax.server.service import Service, new_id, usage
from tbo_jax.server.streams import DONE, EventStream, TextEvents, event
from tbo_jax.server.token_texts import CompletionLogprobs, extended

MAX_TOKENS = 16  # where the body says nothing (OpenAI)


@dataclass
class _Choice:
    """A completion under way."""

    index: int
    prompt_ids: list[int]
    prompt_text: str
    logprobs: CompletionLogprobs
    text: list[str] = field(default_factory=list)
    form: dict[str, list[Any]] | None = None
    finish_reason: str | None = None


class CompletionJob:
    """One request of `/v1/completions`."""

    def __init__(self, service: Service, body: CompletionRequest, salt: str) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._counts = Counts()
        # With `max_tokens` 0 only the prompt is asked for; an engine generates one at least.
        self._only_prompt = body.max_tokens == 0
        self._texts: list[str] = []  # of the prompts, for `echo`
        self._run: Run

    async def answer(self, request_id: str) -> Response:
        """Run it, and answer.

        Raises:
            ApiError: something is refused or fails.
        """
        body = self._body
        self._service.check_model(body.model)
        self._check()
        prompts = await self._prompts()
        params = []
        for prompt in prompts:
            room = self._service.room_for(prompt)
            most = MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
            wants_prompt = body.echo and body.logprobs is not None
            params.append(
                sampling_params(
                    body,
                    self._service.defaults,
                    max_new_tokens=min(most, room),
                    n=body.best_of if body.n is None else body.n,
                    logprobs=body.logprobs,
                    prompt_logprobs=body.logprobs if wants_prompt else None,
                )
            )
        self._run = Run(
            request_id, prompts, params, self._salt, body.priority or 0, bool(body.stream)
        )
        stack = AsyncExitStack()
        updates = await stack.enter_async_context(started(self._service, self._run, self._counts))
        choices = self._choices()  # once it is known that they are not too many
        if body.stream:
            return EventStream(self._events(stack, updates, choices), stack.aclose)
        async with stack:
            return await self._whole(updates, choices)

    def _check(self) -> None:
        body = self._body
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options", "needs stream")
        if body.max_tokens is not None and body.max_tokens < 0:
            raise refused("max_tokens", f"is {body.max_tokens}: expected 0 or more")
        if self._only_prompt and not body.echo:
            raise refused("max_tokens", "is 0: expected 1 or more, or echo")
        if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
            raise refused("best_of", f"is {body.best_of}: expected the same as n, {body.n or 1}")
        if body.logprobs is not None and body.logprobs < 0:
            raise refused("logprobs", f"is {body.logprobs}: expected 0 or more")
        if body.echo and body.logprobs is not None and body.stream:
            raise refused("echo", "with logprobs goes with no stream")
        info = self._service.client.info
        if body.echo and body.logprobs is not None and not info.takes_prompt_logprobs:
            raise refused(
                "echo", "with logprobs needs a server that was started with --prompt-logprobs"
            )

    async def _prompts(self) -> list[list[int]]:
        given: Any = self._body.prompt
        if isinstance(given, str) or (given and all(isinstance(one, int) for one in given)):
            given = [given]
        elif any(isinstance(one, int) for one in given):
            raise refused("prompt", "has token ids among prompts: expected one or the other")
        most = self._service.limits.max_samples
        if not 1 <= len(given) <= most:
            raise refused("prompt", f"has {len(given)} prompts: expected from 1 to {most}")
        prompts = []
        for one in given:
            text = one if isinstance(one, str) else ""
            if isinstance(one, str):
                special = self._body.add_special_tokens
                one = await self._service.prompts.encode(one, special)
            elif self._body.echo:
                text = await self._service.prompts.decode(one)
            self._texts.append(text)
            prompts.append(one)
        return prompts

    def _choices(self) -> list[_Choice]:
        choices: list[_Choice] = []
        run = self._run
        for prompt, text, params in zip(run.prompts, self._texts, run.params, strict=True):
            for _ in range(params.n):
                logprobs = CompletionLogprobs(self._service.texts)
                choices.append(_Choice(len(choices), prompt, text, logprobs))
        return choices

    async def _whole(
        self, updates: AsyncIterator[tuple[int, Update]], choices: list[_Choice]
    ) -> Response:
        prompts: dict[int, Update] = {}  # the last update of each prompt's first completion
        async for number, update in updates:
            choice = choices[number]
            if not self._only_prompt:
                choice.text.append(update.text)
                if update.logprobs is not None:
                    form = choice.logprobs.form(update.token_ids, update.logprobs)
                    choice.form = extended(choice.form, form)
            if update.finish_reason is not None:
                choice.finish_reason = update.finish_reason
                if update.sample == 0:
                    prompts[number] = update
        if self._body.echo:
            last = None
            for number, choice in enumerate(choices):
                last = prompts.get(number, last)
                choice.text.insert(0, choice.prompt_text)
                if last is not None and last.prompt_logprobs is not None:
                    self._put_prompt(choice, last)
        body = self._body_of(
            [
                {
                    "index": choice.index,
                    "text": "".join(choice.text),
                    "logprobs": choice.form,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ]
        )
        return json_response(body | {"usage": self._usage()})

    def _put_prompt(self, choice: _Choice, last: Update) -> None:
        assert last.prompt_logprobs is not None
        before = CompletionLogprobs(self._service.texts)
        form = before.form(choice.prompt_ids, last.prompt_logprobs)
        if choice.form is not None:
            shift = len(choice.prompt_text)
            choice.form["text_offset"] = [shift + at for at in choice.form["text_offset"]]
            form = extended(form, choice.form)
        choice.form = form

    async def _events(
        self,
        stack: AsyncExitStack,
        updates: AsyncIterator[tuple[int, Update]],
        choices: list[_Choice],
    ) -> AsyncIterator[bytes]:
        body, options = self._body, self._body.stream_options
        with_usage = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        more: dict[str, Any] = {"usage": None} if with_usage and not always else {}
        plain = [
            TextEvents(self._chunk(choice, TextEvents.PLACE, None, None) | more)
            for choice in choices
        ]
        async with stack:
            if body.echo:
                for choice in choices:
                    yield event(self._chunk(choice, choice.prompt_text, None, None) | more)
            async for number, update in updates:
                choice, form, text = choices[number], None, update.text
                if self._only_prompt:
                    text = ""
                elif update.logprobs:
                    form = choice.logprobs.form(update.token_ids, update.logprobs)
                if text and form is None and update.finish_reason is None and not always:
                    yield plain[number].of(text)
                elif text or form is not None or update.finish_reason is not None:
                    chunk = self._chunk(choice, text, form, update.finish_reason)
                    yield event(chunk | ({"usage": self._usage()} if always else more))
        if with_usage:
            yield event(self._body_of([]) | {"usage": self._usage()})
        yield DONE

    def _chunk(
        self, choice: _Choice, text: str, logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._body_of([entry])

    def _body_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.names[0],
            "choices": choices,
        }

    def _usage(self) -> dict[str, object]:
        generated = 0 if self._only_prompt else self._counts.generated
        return usage(self._run.prompt_tokens, generated, self._counts.cached)

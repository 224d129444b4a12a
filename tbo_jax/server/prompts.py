"""Texts and conversations as token ids, made in threads: no event loop waits for a tokenizer.

The tokenizers library computes without Python's lock, and chat templates run in a process of their
own. Long texts have threads of their own, so that short ones need not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tbo_jax.server.errors import ApiError
from tbo_jax.text import Tokenizer, TokenizerError

T = TypeVar("T")

LONG = 32_768  # characters from which on a text is a long one
SHORT_THREADS = 4
LONG_THREADS = 1


class PromptReader:
    """Makes token ids of what clients send, and text of token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._short = ThreadPoolExecutor(SHORT_THREADS, "tbo_jax short prompts")
        self._long = ThreadPoolExecutor(LONG_THREADS, "tbo_jax long prompts")

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """What `work` gives, which reads so many characters, in a thread.

        Raises:
            ApiError: 400: `work` raises a ValueError.
        """
        pool = self._long if characters >= LONG else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return await self.run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens with theirs."""
        return await self.run(4 * len(ids), lambda: self.tokenizer.decode(ids, False))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation."""

        def work() -> list[int]:
            try:
                return self.tokenizer.encode_chat(messages, add_generation_prompt, arguments, tools)
            except TokenizerError as error:
                raise ApiError(400, str(error), param="messages") from None

        return await self.run(sum(len(str(m.get("content"))) for m in messages), work)

    def close(self) -> None:
        """End the threads."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

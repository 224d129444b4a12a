"""What the parts of the API share: the engine, the tokenizer, limits and counts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tbo_jax.server.auth import Keys
from tbo_jax.server.errors import ApiError
from tbo_jax.server.families import Families
from tbo_jax.server.interface import EngineClient
from tbo_jax.server.metrics import Metrics
from tbo_jax.server.prompts import PromptReader
from tbo_jax.server.queue import TokenQueue
from tbo_jax.server.settings import ServerSettings, words
from tbo_jax.server.token_texts import TokenTexts
from tbo_jax.text import Tokenizer, default_sampling

_LEAST_QUEUE = 2**20  # tokens


class Service:
    """A model that is served.

    Making one reads the tokenizer, which takes up to seconds.

    Attributes:
        names: those of the model; answers have the first one.
        draining: whether the server is about to end, and takes no more requests.

    Args:
        client: the engine, which is ready.
        model: name of the model where the settings give none.
        settings: of the server.
        keys: API keys.

    Raises:
        ValueError: something is wrong with the tokenizer or the chat template.
    """

    def __init__(
        self,
        client: EngineClient,
        model: str,
        settings: ServerSettings,
        keys: Sequence[str] = (),
    ) -> None:
        self.client = client
        self.settings = settings
        self.limits = settings.limits
        self.names = words(settings.served_model_name) or (model,)
        self.keys = Keys(keys)
        info = client.info
        tokenizer = Tokenizer.from_folder(info.folder)
        if settings.chat_template is not None:
            tokenizer = tokenizer.with_chat_template(_text(settings.chat_template))
        self.prompts = PromptReader(tokenizer)
        self.texts = TokenTexts(tokenizer, info.vocab_size)
        self.defaults = default_sampling(info.folder)
        self.families = Families.of(
            info.folder, settings.tool_call_parser, settings.reasoning_parser
        )
        most = self.limits.max_queued_tokens or max(_LEAST_QUEUE, 256 * info.max_context)
        self.queue = TokenQueue(most)
        self.metrics = Metrics(self.names[0])
        self.draining = False
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for the name of another model."""
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"model {name!r:.80} is not served here: expected {served}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """ApiError 503 when the server is about to end."""
        if self.draining:
            raise ApiError(503, "the server is about to end", headers={"Retry-After": "5"})

    def room_for(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt.

        Raises:
            ApiError: 400: none may, or there is no prompt.
        """
        longest = self.client.info.max_context
        if not prompt:
            raise ApiError(400, "the prompt has no tokens: expected one or more")
        if len(prompt) >= longest:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens: expected less than the context of {longest}",
                code="context_length_exceeded",
            )
        return longest - len(prompt)


def new_id(kind: str) -> str:
    """An id that nothing else has, as "chatcmpl-..."."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage(prompt: int, generated: int, cached: int) -> dict[str, object]:
    """Counts of tokens, in OpenAI's form."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: {error}") from error


def encode(value: object) -> bytes:
    """JSON."""
    return msgspec.json.encode(value)

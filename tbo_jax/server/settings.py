"""What a server is told beside the options of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from tbo_jax.overlap.checks import whole_number

Words = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a request, and all of them together, may take.

    Raises:
        ValueError: one is not a positive number.
    """

    max_body_bytes: int = 8 * 2**20
    """Longest body of a request; longer ones are answered with 413."""
    max_header_bytes: int = 32 * 2**10
    """Longest head of a request."""
    max_queued_tokens: int | None = None
    """Most tokens that the requests under way may need together, prompts and what may be generated;
    further ones are answered with 429. Default: 256 full contexts, and 1,048,576 at least."""
    max_samples: int = 128
    """Most completions of one request: its prompts times n."""
    header_seconds: float = 20.0
    """How long the head of a request may take."""
    body_seconds: float = 60.0
    """How long the body of a request may take."""
    keep_alive_seconds: int = 75
    """How long a connection without a request is kept."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes", "max_samples", "keep_alive_seconds"):
            whole_number(name, getattr(self, name), 1)
        if self.max_queued_tokens is not None:
            whole_number("max_queued_tokens", self.max_queued_tokens, 1)
        for name in ("header_seconds", "body_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected more than 0")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Who may ask, under which name, and for how much."""

    served_model_name: Words = ()
    """Name of the model for clients; several, or the option repeated, for several names. Default:
    MODEL as it is given."""
    api_key: Words = ()
    """Key that a client has to give; several, or the option repeated, for several. Default: those
    of TBO_API_KEY, with commas between them; without any, everybody may ask."""
    allowed_origins: Words = ()
    """Web pages of other servers that may ask (CORS), such as https://example.org, or "*"."""
    chat_template: Path | None = None
    """File with the chat template, in place of that of the model."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools; default: that of the family of the model."""
    reasoning_parser: str | None = None
    """How the model writes what it thinks; default: that of the family of the model."""
    shutdown_seconds: float = 30.0
    """After SIGTERM or Ctrl-C, how long the requests under way may go on."""
    api_workers: int = 1
    """Processes that answer requests: HTTP, templates, tokenizing. The engine has one of its own
    beside them."""
    step_timeout: float = 300.0
    """Seconds after which a step of the engine hangs: then its process is started anew."""
    stream_interval: float = 0.01
    """Seconds for which the tokens of a stream are gathered before they are sent in one event. The
    first is sent at once. Only steps that are quicker than that wait for another one; 0 sends each
    token at once."""
    limits: tyro.conf.OmitArgPrefixes[Limits] = field(default_factory=Limits)
    """What requests may take."""

    def __post_init__(self) -> None:
        whole_number("api_workers", self.api_workers, 1)
        if not self.step_timeout > 0:
            raise ValueError(f"step_timeout is {self.step_timeout}: expected more than 0")
        if not 0 <= self.stream_interval <= 10:
            raise ValueError(f"stream_interval is {self.stream_interval}: expected from 0 to 10")

    def keys(self, environment: str | None) -> tuple[str, ...]:
        """The API keys: those of the command line, or else of the environment's variable.

        Raises:
            ValueError: one is empty.
        """
        keys = words(self.api_key)
        if not keys and environment:
            keys = tuple(key.strip() for key in environment.split(","))
        if not all(keys):
            raise ValueError("an API key is empty: expected some letters")
        return keys


def words(given: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The values of an option that may be repeated and may have several."""
    return tuple(word for some in given for word in some)

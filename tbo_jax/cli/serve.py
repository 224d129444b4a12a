"""Serve a Hugging Face checkpoint over HTTP, as OpenAI's API does.

    tbo-jax serve DIR_OR_HUB_ID
    USE_TBO=auto tbo-jax serve DIR_OR_HUB_ID --host 0.0.0.0 --api-key KEY

/ is a page to chat with the model, /docs lists the API. SIGTERM or Ctrl-C ends the server: it takes
no new requests, and those under way end within --shutdown-seconds. Exit status: 0, or 2 if it could
not start.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Annotated

import tyro

from tbo_jax.cli.decode import overlap_config
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.devices import use_most_memory
from tbo_jax.host.command import run_command
from tbo_jax.host.quiet import silence_libraries
from tbo_jax.server.settings import ServerSettings

_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Command line."""

    model: tyro.conf.Positional[str]
    """Hugging Face folder, or id of a model on the hub."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all of this machine's."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    server: tyro.conf.OmitArgPrefixes[ServerSettings] = dataclasses.field(
        default_factory=ServerSettings
    )
    """Who may ask, and for how much."""
    micro_batches: int | None = None
    """Into how many micro-batches steps are cut with USE_TBO=1 or auto; default 2."""
    prompt_logprobs: bool = False
    """Compile what log-probabilities of prompts need: echo with logprobs, as evaluations ask for
    it."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = dataclasses.field(
        default_factory=EngineConfig
    )
    """The model on the machine."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress on stderr, and no log but of errors."""


def serve(args: Arguments) -> int:
    """Run the command; returns the exit status when the server has ended."""
    try:
        from tbo_jax.server.run import listen, make_client, run
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ImportError(
            f"the package {error.name} is missing: expected what `pip install 'tbo-jax[serve]'` "
            "installs"
        ) from error
    if args.quiet:
        silence_libraries()
    else:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("tbo_jax").setLevel(logging.INFO)
    # What is wrong is told before a model is loaded.
    keys = args.server.keys(os.environ.get("TBO_API_KEY"))
    config = dataclasses.replace(
        args.engine,
        overlap=overlap_config(args.micro_batches),
        prompt_logprobs=args.prompt_logprobs,
    )
    listening = listen(args.host, args.port)
    with listening:
        use_most_memory()
        client = make_client(args.model, config, show_progress=not args.quiet)
        run(listening, client, args.model, args.server, keys)
    return 0


def main(words: list[str], name: str) -> int:
    """Run the command `name` with its words; returns the exit status."""

    def command() -> int:
        return serve(tyro.cli(Arguments, description=__doc__, prog=name, args=words))

    return run_command(name, command)

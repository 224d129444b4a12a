"""Serve a Hugging Face checkpoint over HTTP, as OpenAI's API does.

    tbo-jax serve DIR_OR_HUB_ID
    USE_TBO=auto tbo-jax serve DIR_OR_HUB_ID --host 0.0.0.0 --api-key KEY
    tbo-jax serve DIR_OR_HUB_ID --coordinator HOST:PORT --num-processes N --process-id I

/ is a page to chat with the model, /docs lists the API. SIGTERM or Ctrl-C ends the server: it takes
no new requests, and those under way end within --shutdown-seconds. The engine has a process of its
own, which is started anew when it dies; no request is lost by that. Exit status: 0, 2 if something
that was given is wrong, 1 if the engine failed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from tbo_jax.cli.decode import is_one_of_several, overlap_config
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.devices import use_most_memory
from tbo_jax.host.command import run_command
from tbo_jax.host.quiet import silence_libraries
from tbo_jax.server.settings import ServerSettings

if TYPE_CHECKING:
    from tbo_jax.server.control import Hosts

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
    coordinator: str | None = None
    """Run as one of several hosts, started alike: HOST:PORT of the first, which has the API."""
    num_processes: int | None = None
    """How many hosts there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    micro_batches: int | None = None
    """Into how many micro-batches steps are cut with USE_TBO=1 or auto; default 2."""
    expert_chunks: int | None = None
    """Into how many chunks the expert exchange is cut with USE_TBO=expert_chunks or auto; default
    2."""
    prompt_logprobs: bool = False
    """Compile what log-probabilities of prompts need: echo with logprobs, as evaluations ask for
    it."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = dataclasses.field(
        default_factory=EngineConfig
    )
    """The model on the machine."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress on stderr, and no log but of errors."""


def serve(args: Arguments, name: str) -> int:
    """Run the command; returns the exit status when the server has ended."""
    try:
        from tbo_jax.server.hosting import Serving, host
        from tbo_jax.server.log import log_to_stderr
        from tbo_jax.server.run import listen
        from tbo_jax.server.supervisor import EngineFailed
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
        log_to_stderr()
    # What is wrong is told before a model is loaded.
    keys = args.server.keys(os.environ.get("TBO_API_KEY"))
    config = dataclasses.replace(
        args.engine,
        overlap=overlap_config(args.micro_batches, args.expert_chunks),
        prompt_logprobs=args.prompt_logprobs,
    )
    hosts = hosts_of(args)
    serving = Serving(args.model, args.server, keys, quiet=args.quiet)
    use_most_memory()
    has_api = hosts is None or hosts.process_id == 0
    listening = listen(args.host, args.port) if has_api else None
    try:
        host(listening, serving, config, hosts)
    except EngineFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if listening is not None:
            listening.close()
    return 0


def hosts_of(args: Arguments) -> Hosts | None:
    """The group of engines that this one is part of.

    Raises:
        ValueError: it is not told how many there are, or which this is.
    """
    from tbo_jax.server.control import Hosts

    if not is_one_of_several(args.coordinator, args.num_processes, args.process_id):
        return None
    assert args.coordinator is not None
    if args.num_processes is None or args.process_id is None:
        raise ValueError(
            f"--num-processes is {args.num_processes} and --process-id {args.process_id}: expected "
            "both beside --coordinator"
        )
    return Hosts(args.coordinator, args.num_processes, args.process_id)


def main(words: list[str], name: str) -> int:
    """Run the command `name` with its words; returns the exit status."""

    def command() -> int:
        return serve(tyro.cli(Arguments, description=__doc__, prog=name, args=words), name)

    return run_command(name, command)

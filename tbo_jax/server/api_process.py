"""One of several processes of the API; see `hosting`."""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys

from tbo_jax.host.command import run_command
from tbo_jax.host.parent import die_with
from tbo_jax.server.event_loop import new_event_loop
from tbo_jax.server.hosting import Serving, serve_api
from tbo_jax.server.log import log_to_stderr
from tbo_jax.server.run import raise_file_limit


def main() -> int:
    """Run as `python -m tbo_jax.server.api_process FD PARENT`: the listening socket, whose it is.

    What is served comes on stdin.
    """
    fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    serving = pickle.load(sys.stdin.buffer)
    assert isinstance(serving, Serving)
    if not serving.quiet:
        log_to_stderr()
    raise_file_limit()
    with (
        socket.socket(fileno=fd) as listening,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(serve_api(listening, serving))
    return 0


if __name__ == "__main__":
    sys.exit(run_command("tbo-jax serve", main))

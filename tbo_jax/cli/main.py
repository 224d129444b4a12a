"""tbo-jax: two-batch overlap for Flax decoders.

    tbo-jax decode --model DIR_OR_HUB_ID --prompt "In the beginning"
    tbo-jax serve DIR_OR_HUB_ID --port 8000
    tbo-jax schedule --target h100x8 --tokens 256

Each command has a --help of its own.
"""

from __future__ import annotations

import importlib
import sys

from tbo_jax.host.command import REFUSED, run_command

COMMANDS = {  # module with main(words, name), and what it is for
    "decode": ("tbo_jax.cli.decode", "decode prompts with a Hugging Face checkpoint"),
    "serve": ("tbo_jax.cli.serve", "serve a checkpoint over HTTP, as OpenAI's API does"),
    "schedule": (
        "tbo_jax.schedule.__main__",
        "show what overlap hides on a machine that need not be there",
    ),
}


def main(words: list[str] | None = None) -> int:
    """Run the command that the first word names, with the words after it."""
    words = sys.argv[1:] if words is None else words
    return run_command("tbo-jax", lambda: _run(words))


def _run(words: list[str]) -> int:
    first, *rest = words or ["--help"]
    if first in COMMANDS:
        module = importlib.import_module(COMMANDS[first][0])
        status: int = module.main(rest, f"tbo-jax {first}")
        return status
    if first == "--version":
        import tbo_jax

        print(f"tbo-jax {tbo_jax.__version__}")
        return 0
    listed = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    if first in ("--help", "-h"):
        print(f"{__doc__}\ncommands:\n{listed}")
        return 0 if words else REFUSED
    print(f"tbo-jax: {first!r} is no command, expected one of\n{listed}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())

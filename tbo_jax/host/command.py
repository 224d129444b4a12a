"""What every command does around its work: one line for what went wrong, and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import jax

FAILED = 1  # something could not run, or its output could not be written
REFUSED = 2  # nothing was tried: a wrong option, model or machine
INTERRUPTED = 130  # as shells say of SIGINT


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run `command`, which gives the exit status; what is wrong is told in one line on stderr.

    Bugs still show a traceback: an exception is told in one line only if it speaks of what the user
    gave, of the machine, or of what XLA cannot compile.
    """
    if sys.stderr is None:  # closed: there is nobody to tell
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, to the end of the process
    if sys.stdout is None:
        print(f"{name}: stdout is closed: expected a place to print to", file=sys.stderr)
        return REFUSED
    try:
        try:
            return command()
        finally:  # what was printed before something went wrong is not lost with it
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough: `tbo-jax decode ... | head`
        _let_go_of_stdout()
        return FAILED
    except OSError as error:  # such as a full disk
        _let_go_of_stdout()
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    except jax.errors.JaxRuntimeError as error:  # such as a step that no memory holds
        first, _, rest = str(error).partition("\n")
        more = " ..." if rest.strip() else ""
        print(f"{name}: XLA cannot compile or run this: {first}{more}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _let_go_of_stdout() -> None:
    """Keep Python from writing what is left at its end: that would fail again, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

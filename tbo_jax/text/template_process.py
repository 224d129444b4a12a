"""Renders chat templates in a process of its own; run as a script by `text.template_client`.

A template comes with a checkpoint and is untrusted. jinja2's sandbox keeps it from the machine, but
not from looping for ever or asking for all memory, and code in the same process cannot always end
that. So this process renders, with its memory limited, and `text.template_client` ends it when it
takes long. It ends itself soon after that time, because the other process may have been killed.

Each line of standard input is a JSON object with "source", "variables" and "seconds", after which
this process ends; each line of standard output is one with "text", or with "error". Nothing of
tbo_jax is imported: the start must be quick.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY = 1 << 30  # bytes of address space beside what the process has at its start
_MOST_TEXT = 1 << 26  # characters; far more than any context has


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The answer to one request."""
    try:
        template = _compile(request["source"])
    except jinja2.TemplateSyntaxError as error:
        reason = f"does not compile: {error.message} (line {error.lineno})"
        return {"error": f"the chat template {reason}"}
    except MemoryError:
        return {"error": "the chat template does not compile: it needs too much memory"}
    except Exception as error:  # such as a SyntaxError of what jinja2 makes of it
        return {"error": f"the chat template does not compile: {_named(error)}"}
    try:
        parts, size = [], 0
        for part in template.generate(request["variables"]):
            parts.append(part)
            size += len(part)
            if size > _MOST_TEXT:
                return {"error": f"the chat template wrote more than {_MOST_TEXT} characters"}
        return {"text": "".join(parts)}
    except MemoryError:
        parts = []
        return {"error": "the chat template failed: it needs too much memory"}
    except RecursionError:
        return {"error": "the chat template failed with RecursionError: it calls itself for ever"}
    except jinja2.TemplateError as error:
        return {"error": f"the chat template refused the messages: {error}"}
    except Exception as error:
        # Expressions of the template raise whatever Python raises for them: TypeError, ...
        return {"error": f"the chat template failed with {_named(error)}"}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, because what is assigned inside such a block is not seen after it.
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has such limits
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, most))


def _end_after(seconds: float) -> None:
    """Lets the system end this process after a time, whatever it does then; 0 calls that off."""
    if hasattr(signal, "setitimer"):  # not every system has timers
        # The process that starts this one may ignore or block the signal, which is inherited.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main(write: Callable[[str], Any] = sys.stdout.write) -> None:
    """Answers requests until there are no more."""
    _limit_memory()
    write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        _end_after(request["seconds"])
        answered = answer(request)
        _end_after(0)
        write(json.dumps(answered) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

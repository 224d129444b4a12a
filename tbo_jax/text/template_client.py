"""The process that renders chat templates, and how long it may take.

Templates run in jinja2's immutable sandbox, in a process of their own (`text.template_process`)
whose time and memory are limited. Whatever a template does, the prompt that it was for gets an
error and nothing else is touched. A text costs a fraction of a millisecond more than in this
process, and the first one the start of an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tbo_jax.text.files import TokenizerError

_SECONDS = 10.0  # for one text; templates take milliseconds
_SECONDS_MORE = 5.0  # after which the process ends itself, should this one be gone
_SECONDS_TO_START = 60.0
_START = "the start of the process that renders chat templates"


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template, from any thread.

    Args:
        source: jinja2 text.
        variables: what the template sees, of JSON types.

    Raises:
        TokenizerError: the template does not compile, refused, failed, or took too much time or
            memory; or its process does not start, or was ended by another.
    """
    return _PROCESS.render(source, variables)


class _TemplateProcess:
    """The process that renders templates, one for all; started when it is first needed.

    It ends with this one, because its standard input ends then. What it renders at that moment has
    little more than its usual time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        request = {"source": source, "variables": variables, "seconds": _SECONDS + _SECONDS_MORE}
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop(self._process)  # somebody ended it while it had nothing to do
            if self._process is None:
                self._process = self._start()
            line = self._ask(
                self._process, json.dumps(request) + "\n", _SECONDS, "the chat template"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise TokenizerError(answer["error"])
        return answer["text"]

    def _start(self) -> subprocess.Popen[str]:
        try:
            # -P: the folder of the script holds modules that are not for it to import.
            process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the process that asks
            )
        except OSError as error:  # such as too many processes, or too many open files
            raise TokenizerError(f"{_START} failed: {error}") from error
        self._ask(process, "", _SECONDS_TO_START, _START)
        return process

    def _ask(self, process: subprocess.Popen[str], request: str, seconds: float, what: str) -> str:
        """The line that a request is answered with.

        Raises:
            TokenizerError: there is none, and the process is over; it says that `what` failed.
        """
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        line = ""
        try:
            timer.start()
            with contextlib.suppress(OSError):
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
        except RuntimeError as error:  # too many threads
            raise TokenizerError(f"{what} failed: {error}") from error
        finally:
            timer.cancel()
            if timer.ident is not None:
                timer.join()  # it may be about to kill
            answered = line.endswith("\n")  # the process may end amid a line
            if not answered or process.poll() is not None:
                self._stop(process)
        if answered:
            return line
        if late.is_set():
            raise TokenizerError(f"{what} took longer than {seconds:g} seconds")
        raise TokenizerError(
            f"{what} failed: the process ended with status {process.returncode} "
            "(there is too little memory, or somebody ended it)"
        )

    def _stop(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        process.kill()
        with contextlib.suppress(OSError), process:
            pass  # leaving closes the pipes and waits

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._stop(self._process)

    def forget(self) -> None:
        """Leave the process to this one's parent, whose child this is: a fork copies its pipes."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                os.close(pipe.fileno())
                pipe.detach().detach()  # type: ignore[attr-defined]


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)
os.register_at_fork(after_in_child=_PROCESS.forget)

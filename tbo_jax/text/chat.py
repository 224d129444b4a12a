"""Chat templates: where they are, what they see, and how long they may take.

The conventions (variables, filters, the generation block) are those of the "Chat templates" chapter
of the Hugging Face transformers documentation. Templates come with checkpoints and are untrusted,
so they run in jinja2's immutable sandbox, in a process of their own (`text.template_process`) whose
time and memory are limited, and see values of JSON only. Whatever a template does, the prompt that
it was for gets an error and nothing else is touched. A text costs a fraction of a millisecond more
than in this process, and the first one the start of an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tbo_jax.text.files import TokenizerError, read_text

Message = Mapping[str, str]

_SECONDS = 10.0  # for one text; templates take milliseconds
_SECONDS_TO_START = 60.0
_TAKEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
    | {"raise_exception", "strftime_now"}
)


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Source of the folder's chat template, or None where it has none.

    `chat_template.jinja` comes first, then `tokenizer_config["chat_template"]`: a string, or a list
    of {"name", "template"} of which the entry named "default" is taken.

    Raises:
        TokenizerError: the template has another type than these.
    """
    source = read_text(folder / "chat_template.jinja")
    if source is not None:
        return source
    entry = tokenizer_config.get("chat_template")
    if entry is None or isinstance(entry, str):
        return entry
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    if not isinstance(entry, list):
        raise TokenizerError(
            f"{where}: expected a string or a list of named templates, got {type(entry).__name__}"
        )
    named: dict[str, str] = {}
    for index, item in enumerate(entry):
        fields = item if isinstance(item, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(
                f'{where}[{index}]: expected {{"name": str, "template": str}}, got {item!r:.80}'
            )
        named[name] = template
    return named.get("default")


def check_template_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments of a chat template, such as {"enable_thinking": False}; None gives none.

    Raises:
        TokenizerError: they are no object of names and JSON values, or a name is taken.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise TokenizerError(
            "chat template arguments: expected an object of names and values, "
            f"got {arguments!r:.80}"
        )
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TokenizerError(f"chat template arguments: expected a name, got {name!r:.80}")
        if name in _TAKEN:
            raise TokenizerError(f"chat template argument {name!r}: the template has it already")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(
                f"chat template argument {name!r}: expected a JSON value: {error}"
            ) from error
    return dict(arguments)


class ChatTemplate:
    """A chat template. It is compiled when it is first rendered.

    Args:
        source: jinja2 text.
        special_tokens: variables that the template sees beside the messages, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation.

        Args:
            messages: at least one {"role": str, "content": str}, and no other key.
            add_generation_prompt: end with the header of an assistant message.
            arguments: further variables that the template sees, of JSON types.

        Raises:
            TokenizerError: a message of another shape, an argument that is not one, or the template
                does not compile, refused, failed, or took too much time or memory.
        """
        plain = _plain_messages(messages)
        further = check_template_arguments(arguments)
        for name in further:
            if name in self._special_tokens:
                raise TokenizerError(
                    f"chat template argument {name!r}: the template has it already"
                )
        variables = {
            **further,
            **self._special_tokens,
            "messages": plain,
            "tools": None,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return _PROCESS.render(self._source, variables)


class _TemplateProcess:
    """The process that renders templates, one for all; started when it is first needed.

    It ends with this one, because its standard input ends then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a template, from any thread.

        Raises:
            TokenizerError: there is none.
        """
        request = json.dumps({"source": source, "variables": variables})
        with self._lock:
            if self._process is None:
                self._process = self._start()
            line = self._ask(self._process, request, _SECONDS)
        if not line:
            raise TokenizerError(
                f"the chat template took longer than {_SECONDS:g} seconds, or more memory than "
                "there is"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise TokenizerError(answer["error"])
        return answer["text"]

    def _start(self) -> subprocess.Popen[str]:
        # -P: the folder of the script holds modules that are not for it to import.
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        if not self._ask(process, "", _SECONDS_TO_START):
            raise TokenizerError("the process that renders chat templates did not start")
        return process

    def _ask(self, process: subprocess.Popen[str], request: str, seconds: float) -> str:
        """The line that a request is answered with; empty, and the process over, where none is."""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        line = ""
        try:
            with contextlib.suppress(OSError):
                if request:
                    process.stdin.write(request + "\n")
                    process.stdin.flush()
                line = process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # it may be about to kill
            if not line or process.poll() is not None:
                self._stop(process)
        return line

    def _stop(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._stop(self._process)


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    expected = 'expected {"role": str, "content": str}'
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"messages: expected a list of messages, got {type(messages).__name__}"
        )
    if not messages:
        raise TokenizerError("messages: expected at least one message, got an empty list")
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise TokenizerError(f"{where}: {expected}, got {type(message).__name__}")
        if set(message) != {"role", "content"}:
            keys = ", ".join(sorted(repr(key) for key in message)) or "none"
            raise TokenizerError(f"{where}: {expected}, got the keys {keys}")
        for key, value in message.items():
            if not isinstance(value, str):
                raise TokenizerError(
                    f"{where}[{key!r}]: expected a str, got {type(value).__name__}"
                )
        # A subclass of str could bring methods that the sandbox does not know to be harmless.
        plain.append({key: str.__str__(message[key]) for key in ("role", "content")})
    return plain

"""Chat templates: a jinja2 sandbox with the names that Hugging Face chat templates rely on.

The conventions (variables, filters, the generation block) are those of the "Chat templates" chapter
of the Hugging Face transformers documentation. Templates come with checkpoints and are untrusted,
so they run in jinja2's immutable sandbox and see plain strings only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tbo_jax.text.files import TokenizerError, read_text

Message = Mapping[str, str]


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


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: jinja2 text.
        special_tokens: variables that the template sees beside the messages, such as `bos_token`.

    Raises:
        TokenizerError: the text is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template does not compile: {error.message} (line {error.lineno})"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Text of a conversation.

        Args:
            messages: at least one {"role": str, "content": str}, and no other key.
            add_generation_prompt: end with the header of an assistant message.

        Raises:
            TokenizerError: a message of another shape, or the template refused or failed.
        """
        plain = _plain_messages(messages)
        try:
            return self._template.render(
                **self._special_tokens,
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refused the messages: {error}") from error
        except Exception as error:
            # Expressions of the template raise whatever Python raises for them: TypeError, ...
            raise TokenizerError(
                f"the chat template failed with {type(error).__name__}: {error}"
            ) from error


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

"""Chat templates: where they are, and what they see.

The conventions (variables, filters, the generation block) are those of the "Chat templates" chapter
of the Hugging Face transformers documentation. Templates come with checkpoints and are untrusted,
so they run in a process of their own (`text.template_client`), and see values of JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tbo_jax.text import template_client
from tbo_jax.text.files import TokenizerError, read_text

Message = Mapping[str, Any]

_FURTHER_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")

_TAKEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
    | {"raise_exception", "strftime_now"}
    | {"self"}  # jinja2 has it in every template
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
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Text of a conversation.

        Args:
            messages: at least one {"role": str, "content": str}, with any of "name", "tool_calls",
                "tool_call_id" and "reasoning_content" beside them, of JSON types, and no other key.
            add_generation_prompt: end with the header of an assistant message.
            arguments: further variables that the template sees, of JSON types.
            tools: what the model may call, of JSON types, as transformers' templates take them.

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
            "tools": _plain_tools(tools),
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return template_client.render(self._source, variables)


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
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
        keys = set(message)
        if not keys >= {"role", "content"} or keys - {"role", "content", *_FURTHER_KEYS}:
            listed = ", ".join(sorted(repr(key) for key in message)) or "none"
            raise TokenizerError(f"{where}: {expected}, got the keys {listed}")
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise TokenizerError(
                    f"{where}[{key!r}]: expected a str, got {type(message[key]).__name__}"
                )
        # A subclass of str could bring methods that the sandbox does not know to be harmless.
        entry: dict[str, Any] = {key: str.__str__(message[key]) for key in ("role", "content")}
        for key in keys.intersection(_FURTHER_KEYS):
            entry[key] = _plain(message[key], f"{where}[{key!r}]")
        plain.append(entry)
    return plain


def _plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise TokenizerError(f"tools: expected a list of objects, got {type(tools).__name__}")
    return [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _plain(value: Any, where: str) -> Any:
    """A JSON value without anything that is more than that."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{where}: expected a JSON value: {error}") from error

"""Messages whose parts have marks around them: <think>, <tool_call> and what families have instead.

Where a call begins as its family writes them, up to the brace that begins its arguments, it is
told at once, and the arguments as they come. Any other one is read when it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tbo_jax.server.deltas import Delta, joined
from tbo_jax.server.nesting import Nesting


@dataclass(frozen=True)
class Call:
    """A call as it was read: the function, its arguments as JSON, and the model's own id."""

    name: str
    arguments: str
    call_id: str | None = None


# From the text between the marks, and the schemas of the functions' arguments; None: no call.
Read = Callable[[str, Mapping[str, Any]], Call | None]


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls.

    Attributes:
        begin, end: marks of a call.
        read: reads what is between them.
        heads: how a call begins whose arguments are told as they come: groups "name", or "quoted"
            for one in JSON, and perhaps "id". The arguments follow, an object in JSON.
        around: marks that stand around several calls, and are dropped.
        special: whether the marks are special tokens, which have no text unless it is asked for.
    """

    begin: str
    end: str
    read: Read
    around: tuple[str, ...] = ()
    special: bool = False
    heads: tuple[re.Pattern[str], ...] = ()

    def begun(self, text: str) -> tuple[Delta, int] | None:
        """The call that a text begins, and where its arguments do; None: not known, or none."""
        for head in self.heads:
            if (found := head.match(text)) is None:
                continue
            groups = found.groupdict()
            name = groups.get("name")
            if name is None:
                try:
                    name = json.loads(groups["quoted"])
                except ValueError:
                    return None
            return Delta("call", name, groups.get("id")), found.end()
        return None


class _Object:
    """An object in JSON that comes in pieces: what belongs to it."""

    def __init__(self) -> None:
        self._nesting = Nesting()
        self._is_over = False

    def take(self, text: str) -> str:
        """How much of some more text is its own."""
        if self._is_over:
            return ""
        for at, letter in enumerate(text):
            if self._nesting.take(letter) and self._nesting.depth == 0:
                self._is_over = True
                return text[: at + 1]
        return text


def _json_call(text: str, schemas: Mapping[str, Any]) -> Call | None:
    """{"name": ..., "arguments": {...}}"""
    try:
        value = json.loads(text)
        return Call(value["name"], _dumped(value.get("arguments", value.get("parameters", {}))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _dumped(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_FENCED = re.compile(r"\s*```json\s*(.*?)\s*```\s*", re.S)


def _deepseek_call(text: str, schemas: Mapping[str, Any]) -> Call | None:
    """function<sep>NAME and fenced JSON (V3, R1), or NAME<sep>JSON (V3.1)."""
    head, sep, rest = text.partition("<｜tool▁sep｜>")
    if not sep:
        return None
    name, _, fenced = rest.partition("\n")
    if head.strip() == "function" and (found := _FENCED.fullmatch(fenced)):
        return Call(name.strip(), found[1])
    return Call(head.strip(), rest.strip())


def _kimi_call(text: str, schemas: Mapping[str, Any]) -> Call | None:
    """functions.NAME:NUMBER, a mark, and JSON; what comes before the mark is the id."""
    head, mark, arguments = text.partition("<|tool_call_argument_begin|>")
    head = head.strip()
    name = head.removeprefix("functions.").rpartition(":")[0]
    return Call(name, arguments.strip(), head) if mark and name else None


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)


def _glm_call(text: str, schemas: Mapping[str, Any]) -> Call | None:
    """NAME, and keys and values in marks; values of type string are as they are, others JSON."""
    name = text.partition("<arg_key>")[0].strip()
    if not name:
        return None
    schema = schemas.get(name) or {}
    types = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, value in _PAIR.findall(text):
        of_key = types.get(key.strip())
        is_text = isinstance(of_key, dict) and of_key.get("type") == "string"
        arguments[key.strip()] = value if is_text else _value(value)
    return Call(name, _dumped(arguments))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_JSON_HEADS = (
    re.compile(
        r'\s*\{\s*"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
        re.S,
    ),
)
_DEEPSEEK_HEADS = (
    re.compile(
        r"\s*function\s*<｜tool▁sep｜>[^\S\n]*(?P<name>[^\s<]+)[^\S\n]*\n\s*```json\s*(?=\{)"
    ),
    re.compile(r"\s*(?!function[\s<])(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*(?=\{)"),
)
_KIMI_HEADS = (
    re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+):[^\s<:]*)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
)

CALL_FORMS = {
    "hermes": CallForm("<tool_call>", "</tool_call>", _json_call, heads=_JSON_HEADS),
    "ernie": CallForm(
        "<tool_call>",
        "</tool_call>",
        _json_call,
        around=("<response>", "</response>"),
        heads=_JSON_HEADS,
    ),
    # Its arguments are no JSON, and what JSON they make depends on all of a value.
    "glm": CallForm("<tool_call>", "</tool_call>", _glm_call),
    "deepseek": CallForm(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek_call,
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        special=True,
        heads=_DEEPSEEK_HEADS,
    ),
    "kimi": CallForm(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _kimi_call,
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        special=True,
        heads=_KIMI_HEADS,
    ),
}
THINK = "<think>", "</think>"
TAIL = 16  # tokens at the end of a prompt among which the mark that begins a thought can be


class TagParser:
    """A `ChatParser` for marks. White space beside a mark is none of the message's.

    Args:
        thinks: look for what the model thinks.
        starts_thinking: the prompt ended with the mark that begins a thought.
        form: of calls; None: there are none.
        schemas: of the arguments of functions, by name.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        starts_thinking: bool = False,
        form: CallForm | None = None,
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        self._thinks = thinks
        self._form = form
        self._schemas = schemas or {}
        self._state = "reasoning" if starts_thinking else "content"
        self._after_mark = starts_thinking  # white space that comes now is dropped
        self._held = ""
        self._arguments: _Object | None = None  # of a call that was told

    def push(self, text: str) -> list[Delta]:
        """The deltas that are certain with some more text."""
        self._held += text
        deltas: list[Delta] = []
        while found := self._next_mark():
            at, mark = found
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            deltas += self._close(before, mark)
        if self._state != "call":
            deltas += self._tell(self._cut())
        else:
            begun, self._held = self._begin(self._held)
            deltas += begun
            if self._arguments is not None:
                deltas += self._more(self._cut())
        return joined(deltas)

    def finish(self) -> list[Delta]:
        """What was held back; a call that has no end is content, unless it was told."""
        rest, self._held = self._held, ""
        if self._arguments is not None:
            return joined(self._more(rest))
        if self._state == "call":
            assert self._form is not None
            self._state, self._after_mark = "content", False
            return joined(self._tell(self._form.begin + rest))
        return joined(self._tell(rest))

    def _marks(self) -> tuple[str, ...]:
        """Those that mean something now."""
        if self._state == "reasoning":
            return (THINK[1],)
        if self._state == "call":
            return () if self._form is None else (self._form.end,)
        marks: tuple[str, ...] = THINK if self._thinks else ()
        return marks if self._form is None else (*marks, self._form.begin, *self._form.around)

    def _next_mark(self) -> tuple[int, str] | None:
        found = [(at, mark) for mark in self._marks() if (at := self._held.find(mark)) >= 0]
        return min(found, default=None)

    def _close(self, before: str, mark: str) -> list[Delta]:
        """What comes before a mark, and the state after it."""
        if self._state == "call":
            assert self._form is not None
            self._state, self._after_mark = "content", True
            begun, rest = self._begin(before)
            if self._arguments is not None:
                deltas = [*begun, *self._more(rest)]
                self._arguments = None
                return deltas
            call = self._form.read(before, self._schemas)
            if call is None:
                return [Delta("content", f"{self._form.begin}{before}{mark}")]
            deltas = [Delta("call", call.name, call.call_id)]
            return [*deltas, Delta("arguments", call.arguments)] if call.arguments else deltas
        deltas = self._tell(before.rstrip())
        if mark == THINK[0]:
            self._state = "reasoning"
        elif self._form is not None and mark == self._form.begin:
            self._state = "call"
        else:
            self._state = "content"
        self._after_mark = True
        return deltas

    def _begin(self, text: str) -> tuple[list[Delta], str]:
        """The call that a text begins if it is to be told now, and what follows in the text."""
        assert self._form is not None
        if self._arguments is not None or (begun := self._form.begun(text)) is None:
            return [], text
        self._arguments = _Object()
        call, end = begun
        return [call], text[end:]

    def _more(self, text: str) -> list[Delta]:
        """Arguments of the call that was told last; what follows them is dropped."""
        assert self._arguments is not None
        taken = self._arguments.take(text)
        return [Delta("arguments", taken)] if taken else []

    def _cut(self) -> str:
        """Take what cannot belong to a mark, or be white space before one, from what is held."""
        text, end = self._held, len(self._held)
        longest = max(map(len, self._marks()), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(mark.startswith(text[start:]) for mark in self._marks()):
                end = start
                break
        end = len(text[:end].rstrip()) if self._marks() else end
        self._held = text[end:]
        return text[:end]

    def _tell(self, text: str) -> list[Delta]:
        if self._after_mark:
            text = text.lstrip()
        if not text:
            return []
        self._after_mark = False
        return [Delta(self._state, text)]

"""gpt-oss's form of messages: channels, of which one is what the model thinks, and calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The text is read, not the tokens: openai-harmony has a vocabulary of its own to load for those.
"""

from __future__ import annotations

import re

from tbo_jax.server.deltas import Delta, joined

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser:
    """A `ChatParser` for it. Without `calls` those are content, as what is on no channel is."""

    def __init__(self, calls: bool) -> None:
        self._calls = calls
        self._kind = ""  # of the message under way; empty in a head
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        """The deltas that are certain with some more text."""
        self._held += text
        deltas: list[Delta] = []
        while True:
            if not self._kind:
                head, mark, rest = self._held.partition(_MESSAGE)
                if not mark:
                    return joined(deltas)
                deltas += self._begin(head)
                self._held = rest
            found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
            if not found:
                break
            at, mark = min(found)
            deltas.append(Delta(self._kind, self._held[:at]))
            # The next head begins with the mark of a channel, or has it later.
            self._held = self._held[at + (0 if mark == "<|channel|>" else len(mark)) :]
            self._kind = ""
        end = self._safe_end()
        deltas.append(Delta(self._kind, self._held[:end]))
        self._held = self._held[end:]
        return joined(deltas)

    def finish(self) -> list[Delta]:
        """What was held back; a head without a message is content only if it is a plain text."""
        rest, self._held = self._held, ""
        if self._kind:
            return joined([Delta(self._kind, rest)])
        return joined([Delta("content", rest)]) if "<|" not in rest and rest.strip() else []

    def _begin(self, head: str) -> list[Delta]:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient is not None and self._calls:
            self._kind = "arguments"
            return [Delta("call", recipient[1])]
        analysis = channel is not None and channel[1] == "analysis"
        self._kind = "reasoning" if analysis else "content"
        return []

    def _safe_end(self) -> int:
        longest = max(map(len, _ENDS)) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            if any(mark.startswith(self._held[start:]) for mark in _ENDS):
                return start
        return len(self._held)

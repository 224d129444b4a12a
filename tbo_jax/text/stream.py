"""The text of one request while it is generated, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tbo_jax.text.detokenizer import IncrementalDetokenizer
from tbo_jax.text.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text and ends it right before a stop string, or right after it.

    The text is scanned from left to right. The stop string whose match ends first wins; of several
    matches that end at the same character the longest wins. The text before the match is kept. This
    depends on the text only, not on where its tokens begin and end.

    A stop string that is the text of a special token also ends the text where that token comes,
    although special tokens have no text here. One that has such a token among other text could
    never be found, and is refused.

    Text that may be the beginning of a stop string is held back until it is known not to be one, so
    no part of the stop string that wins is ever emitted, or with `include_stop` all of it at once.

    Args:
        tokenizer: gives the text of the ids.
        stop: stop strings, none of them empty; may itself be empty.
        include_stop: the text ends with the stop string.
        min_tokens: no stop string is found that ends with the text of the first so many tokens.
        skip_special_tokens: special tokens have no text. Otherwise they are text like any other.

    Raises:
        ValueError: `stop` is not a sequence of non-empty strings, or one of them has a special
            token among other text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        if isinstance(stop, str) or not isinstance(stop, Sequence):
            raise ValueError(f"stop: expected a list of strings, got {stop!r:.80}")
        without_text = tokenizer.skipped_tokens if skip_special_tokens else frozenset()
        for index, string in enumerate(stop):
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop[{index}]: expected a non-empty string, got {string!r:.80}")
            within = next((token for token in without_text if token in string), None)
            if within is not None and string not in without_text:
                raise ValueError(
                    f"stop[{index}]: {string!r:.80} has the special token {within!r} among other "
                    "text; expected that token alone, or none, because special tokens have no text"
                )
        self._tokenizer = tokenizer
        self._stop_tokens = without_text.intersection(stop)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._emitted: list[str] = []
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; from then on nothing is emitted."""
        return self._stopped

    @property
    def is_whole(self) -> bool:
        """Whether all the text of the tokens so far is out."""
        return not self._held and self._detokenizer.is_whole

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._emitted)

    def push(self, token_id: int) -> str:
        """Text that has become certain with this token; possibly empty.

        Raises:
            TokenizerError: not a token id.
            RuntimeError: called after `finish`.
        """
        if self._stopped:
            return ""
        self._num_pushed += 1
        if self._stop_tokens and not self._deaf:
            token = self._tokenizer.token(token_id, False)
            if token in self._stop_tokens:
                rest = self.finish()
                if self._include_stop and not self._stopped:
                    rest += token
                    self._emitted.append(token)
                self._stopped = True
                return rest
        return self._scan(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The text that was held back, unless a stop string was found or is found in it."""
        if self._stopped:
            return ""
        delta = self._scan(self._detokenizer.finish())
        rest, self._held = self._held, ""
        self._emitted.append(rest)
        return delta + rest

    @property
    def _deaf(self) -> bool:
        return self._num_pushed <= self._min_tokens

    def _scan(self, new: str) -> str:
        if not new:
            return ""
        text, old = self._held + new, len(self._held)
        # A match ends in what is new: one that ends before was found, or was not to be.
        heard = () if self._deaf else self._stop
        matches = [
            (at + len(stop), at)
            for stop in heard
            if (at := text.find(stop, max(0, old + 1 - len(stop)))) >= 0
        ]
        if matches:
            self._stopped = True
            end, self._held = min(matches)[not self._include_stop], ""
        else:
            end = len(text) - self._num_held(text)
            self._held = text[end:]
        self._emitted.append(text[:end])
        return text[:end]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._stop)), 0)

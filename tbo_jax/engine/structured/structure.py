"""Where the text of a request is in its grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from tbo_jax.engine.structured.vocabulary import GrammarVocabulary


@dataclass(eq=False, slots=True)
class Grammar:
    """A compiled grammar. What its matchers find out about its texts is shared by all of them."""

    start: LLMatcher  # at its beginning, where it stays
    failed: bool = False  # one reached a limit, and others may soon


class Structure:
    """The grammar of one request, and how far its text has come. That follows from its tokens.

    Attributes:
        name: the option that it comes from.
        matcher: llguidance's, after the tokens so far.
        error: why it follows no more; None while it does.
        takes_drafts: whether tokens can be taken back.
        ruled_out: whether something else rules tokens out.
    """

    def __init__(
        self,
        name: str,
        grammar: Grammar,
        vocabulary: GrammarVocabulary,
        ends: Collection[int] = (),
        min_tokens: int = 0,
        takes_drafts: bool = True,
        ruled_out: bool = False,
    ) -> None:
        """Args:
        name: the option that it comes from.
        grammar: of the text.
        vocabulary: that of `grammar`.
        ends: ids that end the request.
        min_tokens: so many tokens come before one of `ends`, if anything else may come.
        takes_drafts: whether tokens can be taken back.
        ruled_out: whether something else rules tokens out.
        """
        self.name = name
        self.takes_drafts = takes_drafts
        self.ruled_out = ruled_out
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._min_tokens = min_tokens
        self._others = vocabulary.all_but(ends) if min_tokens else None
        self.restart()

    @property
    def mask_words(self) -> int:
        """Numbers of 32 bits of a mask of `matcher`."""
        return self._vocabulary.mask_words

    def restart(self, tokens: Sequence[int] = ()) -> None:
        """Be where these tokens lead from the beginning; they may lead into an `error`."""
        self.matcher = self._grammar.start.deep_copy()
        self.error: str | None = None
        self._num_tokens = 0
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> bool:
        """Go on by a generated token that does not end the request, or get an `error`.

        Returns:
            Whether the text is complete, and nothing can follow.
        """
        if self.error is not None:
            return False
        followed = self._vocabulary.first(token) if self._num_tokens == 0 else token
        if followed < 0 or not self.matcher.consume_token(followed):
            self._fail(f"token {token} is not allowed")
            return False
        self._num_tokens += 1
        return self.matcher.is_stopped()

    def _fail(self, reason: str) -> None:
        # llguidance names this one by its code alone.
        self._grammar.failed = True
        told = self.matcher.get_error().removesuffix("\n<non-verbose/>")
        self.error = (
            f"SamplingParams.{self.name} cannot be followed at generated token "
            f"{self._num_tokens}: {reason if told in ('', 'NoExtensionBias') else told}"
        )

    def acceptable(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts that the grammar allows after the text, up to the first that it does not."""
        if not self.takes_drafts or self.error is not None:
            return ()
        return drafts[: self.matcher.validate_tokens(list(drafts))]

    def masks(self, found: np.ndarray) -> np.ndarray:
        """What may come next, and after each draft, with `error` where the first is nothing.

        Args:
            found: [N, mask_words] int32, by `matcher`.

        Returns:
            [N, ceil(V / 32)] int32; bit i % 32 of number i // 32 is that of token i.
        """
        if self._num_tokens == 0:
            found = np.stack([self._vocabulary.first_mask(mask) for mask in found])
        masks = found[:, : self._vocabulary.own.size] & self._vocabulary.own
        if self.matcher.is_error() or not masks[0].any():
            self._fail("no token has the text that may follow")
        if self._others is not None:
            early = self._num_tokens + np.arange(len(masks)) < self._min_tokens
            others = masks & self._others
            masks = np.where((early & others.any(axis=1))[:, None], others, masks)
        return masks

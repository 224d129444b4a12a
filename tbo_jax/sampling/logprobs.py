"""Log-probabilities of tokens, as they are handed out. Needs no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities that the model gave, before any option or filter."""

    token_id: int
    logprob: float
    rank: int  # how many tokens are as probable or more: 1 for the most probable
    top: dict[int, float]  # token id -> logprob of the most probable ones, best first


def read_described(row: np.ndarray, token_id: int, most: int) -> TokenLogprobs:
    """What a row of `sampling.options.describe` says, with the `most` best tokens of those there.

    Args:
        row: [2 + 2 N] int32.
        token_id: that was chosen.
        most: at most N.
    """
    size = (len(row) - 2) // 2
    values = row[: size + 1].view(np.float32)
    ids = row[size + 2 :][:most].tolist()
    top = dict(zip(ids, values[1:].tolist(), strict=False))
    return TokenLogprobs(token_id, float(values[0]), int(row[size + 1]), top)


class PromptLogprobs:
    """What steps told of the tokens of a prompt, each given those before it; L tokens.

    The steps come in order, and what was told once is not told again, so that a request may be
    computed anew from anywhere.
    """

    def __init__(self, token_ids: Sequence[int], most: int) -> None:
        """Nothing is told yet of these tokens; with each, `most` of the best ones are wanted."""
        self.num_told = 0  # of the tokens after the first
        self._token_ids = token_ids
        self._most = most
        self._rows: np.ndarray | None = None  # [L - 1, 2 + 2 N] int32, as `describe` gives them

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wanted any more."""
        return self.num_told >= len(self._token_ids) - 1

    def wanted(self, start: int, stop: int) -> range:
        """Of the tokens from number `start` up to `stop`, those whose successors are to be told."""
        return range(max(start, self.num_told), min(stop, len(self._token_ids) - 1))

    def put(self, first: int, rows: np.ndarray) -> None:
        """Book what was told of the tokens after the `first`-th and those behind it, [N, ...]."""
        if first != self.num_told:
            raise RuntimeError(
                f"told of token {first + 1} of a prompt, expected {self.num_told + 1}"
            )
        if self._rows is None:
            self._rows = np.zeros((len(self._token_ids) - 1, rows.shape[1]), np.int32)
        self.num_told += len(rows)
        self._rows[first : self.num_told] = rows

    def read(self) -> list[TokenLogprobs | None]:
        """Of each token as far as was told; None for the first, which nothing precedes."""
        told: list[TokenLogprobs | None] = [None]
        if self._rows is not None:
            tokens = self._token_ids[1 : self.num_told + 1]
            of_tokens = zip(self._rows, tokens, strict=False)
            told += [read_described(row, token, self._most) for row, token in of_tokens]
        return told

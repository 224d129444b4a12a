"""Log-probabilities of a generated token, as they are handed out. Needs no JAX."""

from __future__ import annotations

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

"""Draft tokens from a request's own text: what followed the last time it read like this."""

from __future__ import annotations

from typing import Any

LONGEST = 3  # last tokens that are looked for
TO_FIND = -2  # among the tokens of a step, in place of a draft that the device finds


def prompt_lookup(tokens: Any, counts: Any, most: int) -> Any:
    """Guess the next tokens from an earlier place with the same last tokens (Saxena 2023).

    The last `LONGEST` tokens are looked for among those before, else fewer of them. Of several
    places the latest counts that `most` tokens follow, or the first one if there is none. What goes
    beyond the end repeats what is between the two, and where the last token is new it is repeated:
    there are always as many drafts, as a step computes that many slots anyway.

    It takes arrays of numpy and of JAX, in a traced function too. So what the device guesses is
    known to a host that has the tokens.

    Args:
        tokens: [B, C] int32, of each sequence, prompt and generated; what is behind them may be
            anything.
        counts: [B] int32, how many there are, at least 1.
        most: D, how many tokens to guess.

    Returns:
        [B, D] int32.
    """
    xp = tokens.__array_namespace__()
    place = xp.arange(tokens.shape[1], dtype=xp.int32)  # of the token that would come next
    matched, same = xp.zeros(tokens.shape, dtype=xp.int32), True
    for back in range(1, LONGEST + 1):
        last = xp.take_along_axis(tokens, xp.maximum(counts - back, 0)[:, None], axis=1)
        there = xp.concat([xp.zeros_like(tokens[:, :back]), tokens[:, :-back]], axis=1) == last
        same = there & (place >= back) & (place < counts[:, None]) & same
        matched = xp.where(same, back, matched)
    best = matched == xp.maximum(xp.max(matched, axis=1, keepdims=True), 1)
    followed = best & (place + most <= counts[:, None])
    latest = xp.max(xp.where(followed, place, -1), axis=1)
    first = xp.min(xp.where(best, place, counts[:, None] - 1), axis=1)
    start = xp.where(latest >= 0, latest, first)[:, None]
    ahead = xp.arange(most, dtype=xp.int32)
    return xp.take_along_axis(tokens, start + ahead % (counts[:, None] - start), axis=1)

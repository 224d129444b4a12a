"""Which rank a request goes to: pages to spare, and what is held of its tokens already."""

from __future__ import annotations

from collections.abc import Sequence

from tbo_jax.engine.scheduling.rank import Rank
from tbo_jax.engine.scheduling.request import Request


def choose_rank(ranks: Sequence[Rank], request: Request) -> tuple[Rank, list[int]] | None:
    """The rank for a request, and the pages there that hold its first tokens; None without room.

    It is the one with most pages to spare, unless another one holds more of its tokens. The gain is
    what need not be computed there, less what more has to be computed there before.

    All ranks run in lockstep, so that the longest row of them is everybody's: a rank that is ahead
    of the emptiest one by more than an eighth of its rows does not get more for what it holds.
    Requests that all begin alike with that spread over the ranks, and each rank computes what they
    share once.
    """
    found = {rank.index: rank.find(request) for rank in ranks}
    able = [rank for rank in ranks if rank.has_room(request, found[rank.index])]
    if not able:
        return None
    if any(found[rank.index] for rank in able):
        rows = min(len(rank.running) for rank in able)
        able = [rank for rank in able if len(rank.running) - rows <= _most_ahead(rank)]
    roomiest = max(able, key=lambda rank: rank.spare)

    def gain(rank: Rank) -> int:
        pages = len(found[rank.index]) - len(found[roomiest.index])
        return pages * rank.page_size - max(0, rank.backlog - roomiest.backlog)

    best = max(able, key=gain)
    chosen = best if gain(best) > 0 else roomiest
    return chosen, found[chosen.index]


def _most_ahead(rank: Rank) -> int:
    """Rows that it may have more than the emptiest one."""
    return max(1, rank.max_sequences // 8)

"""Do the scheduler's queues add up: every unfinished request in one of them, and in its place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tbo_jax.engine.scheduling.rank import Rank, turn_of
from tbo_jax.engine.scheduling.request import Request


def check_books(
    ranks: Sequence[Rank],
    waiting: Sequence[Request],
    ending: Sequence[Request],
    unfinished: Collection[int],
) -> None:
    """RuntimeError naming the page or request that does not add up.

    Args:
        ranks: with the requests that run.
        waiting, ending: requests off the ranks, new or preempted, and those all computed.
        unfinished: the ids of all requests that should be held.
    """
    for rank in ranks:
        rank.check()
    for request in [*waiting, *ending]:
        if request.rank is not None or request.pages or request.num_computed:
            raise RuntimeError(f"{request} is off, but has a rank, pages or computed tokens")
    queues = [list(waiting), *(rank.running for rank in ranks)]
    for queue in queues:
        if queue != sorted(queue, key=turn_of):
            raise RuntimeError(f"{[r.request_id for r in queue]} are out of order")
    held = sorted(request.request_id for queue in [*queues, ending] for request in queue)
    if held != sorted(unfinished):
        raise RuntimeError(f"{held} are queued; unfinished are {sorted(unfinished)}")

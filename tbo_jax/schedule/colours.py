"""Colours of modelled timelines, the same in the picture and on the page."""

from __future__ import annotations

MICRO_BATCHES = ("#9ecae9", "#ffc685", "#a8dba0", "#d7b8ea", "#f5b7c8", "#e3d37c")
NO_SCOPE = "#d4d4d4"  # outside the stages
EXPOSED = "#d0021b"


def colour_of(micro_batch: int) -> str:
    """The colour of a micro-batch; they come again after the last one."""
    return MICRO_BATCHES[micro_batch % len(MICRO_BATCHES)]

"""The static shapes of a step and of the cache: what a compiled program is made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of a step, per rank."""

    tokens: int  # T, token slots
    sequences: int  # B, sequence rows
    decode: bool = False  # every sequence has one token: blocks of one query

    def __str__(self) -> str:
        return f"{'decode' if self.decode else 'prefill'} {self.tokens}"


Program = tuple[Bucket, int]  # the step of a bucket with that many micro-batches


@dataclass(frozen=True)
class CacheConfig:
    """Size of the paged key/value cache of each device."""

    num_pages: int
    page_size: int
    pages_per_sequence: int  # columns P of a page table: longest context / page_size
    max_tokens: int  # most tokens of one step


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... and `last`, which no size exceeds."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return [*sizes, last]

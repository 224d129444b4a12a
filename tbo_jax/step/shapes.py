"""The static shapes of a step and of the cache: what a compiled program is made for."""

from __future__ import annotations

from dataclasses import dataclass

from tbo_jax.attention.rounded import CACHE_DTYPES, CacheDtype
from tbo_jax.overlap.checks import whole_number
from tbo_jax.overlap.config import Strategy


@dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of a step, per rank."""

    tokens: int  # T, token slots
    sequences: int  # B, sequence rows
    decode: bool = False  # every sequence has one token, and `drafts` more at most
    drafts: int = 0  # most of a sequence; with any, more logits than one a sequence are wanted

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens, 1)
        whole_number("sequences", self.sequences, 1)
        if not isinstance(self.decode, bool):
            raise ValueError(f"decode must be True or False, got {self.decode!r}")
        whole_number("drafts", self.drafts, 0)

    @property
    def query_block(self) -> int | None:
        """Queries of a sequence that are computed together, a power of two; None: as many as pay.

        A verify step takes a sequence's tokens as one block, not as a prefill's larger ones.
        """
        return 1 << self.drafts.bit_length() if self.decode else None

    def __str__(self) -> str:
        kind = ("verify" if self.drafts else "decode") if self.decode else "prefill"
        return f"{kind} {self.tokens}"


Program = tuple[Bucket, Strategy]  # the step of a bucket, and how it overlaps


def program_name(bucket: Bucket, strategy: Strategy) -> str:
    """Such as "decode 8 x2" for two micro-batches, "decode 8 expert_chunks 2"."""
    count = strategy.micro_batches
    return f"{bucket} {strategy if strategy.expert_chunks > 1 else f'x{count}'}"


@dataclass(frozen=True)
class CacheConfig:
    """Size of the paged key/value cache of each device."""

    num_pages: int
    page_size: int
    pages_per_sequence: int  # columns P of a page table: longest context / page_size
    max_tokens: int  # most tokens of one step
    dtype: CacheDtype | None = None  # keys and values in 8 bits; None: in the model's dtype

    def __post_init__(self) -> None:
        whole_number("num_pages", self.num_pages, 2, " (page 0 is for padding)")
        for name in ("page_size", "pages_per_sequence", "max_tokens"):
            whole_number(name, getattr(self, name), 1)
        if self.dtype not in (None, *CACHE_DTYPES):
            known = ", ".join(map(repr, (None, *CACHE_DTYPES)))
            raise ValueError(f"the cache's dtype is {self.dtype!r}: expected one of {known}")


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... and `last`, which no size exceeds."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return [*sizes, last]

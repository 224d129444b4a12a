"""Which pages of one rank's key/value cache are in use: host bookkeeping, without a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out the page numbers 1 .. num_pages - 1 of one rank.

    Page 0 is where padding points, so it is never handed out. The page freed last is handed out
    first. Raises ValueError for fewer than two pages.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; expected 2 or more, one being for padding")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_used = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """How many pages there are to hand out, used ones included."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """How many pages can be handed out now."""
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages, or None, and nothing taken, if there are not as many. ValueError if n < 0."""
        if n < 0:
            raise ValueError(f"asked for {n} pages; expected 0 or more")
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._is_used[page] = True
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. RuntimeError, and nothing taken, if one of them is not in use."""
        seen: set[int] = set()
        for page in pages:
            if not 0 < page < self.num_pages:
                raise RuntimeError(f"page {page} freed; the pool has pages 1 to {self.capacity}")
            if not self._is_used[page] or page in seen:
                raise RuntimeError(f"page {page} freed twice")
            seen.add(page)
        for page in reversed(pages):
            self._is_used[page] = False
            self._free.append(page)

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Verify that `owned`, the pages of each sequence, and the free pages make up the pool.

        Raises RuntimeError naming a page that two own, that is owned but free, or that nobody has.
        """
        free = set(self._free)
        seen: set[int] = set()
        for pages in owned:
            for page in pages:
                if not 0 < page < self.num_pages:
                    raise RuntimeError(f"page {page} is owned; the pool has 1 to {self.capacity}")
                if page in seen:
                    raise RuntimeError(f"page {page} is owned twice")
                if page in free or not self._is_used[page]:
                    raise RuntimeError(f"page {page} is owned and free")
                seen.add(page)
        if len(free) != len(self._free):
            raise RuntimeError(f"the free list {sorted(self._free)} names a page twice")
        for page in range(1, self.num_pages):
            if page not in free and page not in seen:
                raise RuntimeError(f"page {page} is neither owned nor free")
            if page in free and self._is_used[page]:
                raise RuntimeError(f"page {page} is free and marked as used")

"""Which pages of one rank's key/value cache are in use, and what is kept of the others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence

from tbo_jax.engine.scheduling.prefixes import Block, Place, PrefixIndex


class PageAllocator:
    """Hands out the page numbers 1 .. num_pages - 1 of one rank.

    Page 0 is where padding points, so it is never handed out. A page is in use by one sequence or,
    once it is kept, by several. A kept page that nobody uses is *idle*: it can be found and shared
    again until its place is needed. Of the others the page freed last is handed out first.

    Idle pages give way in the order in which they became idle, and so mostly from the end of a
    text: whoever uses a page uses those before it, and gives the last one back first. So the page
    that is the first to go is followed by none, used or idle. That does not hold where sequences
    give up their first pages (`in_order` is false). With a page that goes, those that follow it are
    found no more.

    Raises ValueError for fewer than two pages.
    """

    def __init__(self, num_pages: int, in_order: bool = True) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; expected 2 or more, one being for padding")
        self.num_pages = num_pages
        self._in_order = in_order
        self.num_evicted = 0  # idle pages whose place was needed
        self._free = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages
        self._kept = PrefixIndex()
        self._idle: OrderedDict[int, None] = OrderedDict()  # a set, idle the longest first

    @property
    def capacity(self) -> int:
        """How many pages there are to hand out, used ones included."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """How many pages can be handed out now, idle ones included."""
        return len(self._free) + len(self._idle)

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages, or None, and nothing taken, if there are not as many. ValueError if n < 0."""
        if n < 0:
            raise ValueError(f"asked for {n} pages; expected 0 or more")
        if n > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in pages:
            self._users[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages of one sequence, in its order: kept ones are idle if it was the last.

        RuntimeError, and nothing taken, if one of them is not in use.
        """
        seen: set[int] = set()
        for page in pages:
            if not 0 < page < self.num_pages:
                raise RuntimeError(f"page {page} freed; the pool has pages 1 to {self.capacity}")
            if not self._users[page] or page in seen:
                raise RuntimeError(f"page {page} freed twice")
            seen.add(page)
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    # Kept pages

    def find(self, after: Place, block: Block) -> int | None:
        """The kept page of these tokens that follows another one, or the start; or None."""
        return self._kept.find(after, block)

    def is_kept(self, page: int) -> bool:
        """Whether it can be found."""
        return page in self._kept

    def key(self, page: int) -> tuple[Place, Block]:
        """What a kept page follows, and its tokens."""
        return self._kept.key(page)

    def is_idle(self, page: int) -> bool:
        """Whether it is kept, and in nobody's use."""
        return page in self._idle

    def share(self, pages: Iterable[int]) -> None:
        """Have one more sequence use kept pages. RuntimeError for one that is not kept."""
        for page in pages:
            if page not in self._kept:
                raise RuntimeError(f"page {page} is shared and not kept")
            self._idle.pop(page, None)
            self._users[page] += 1

    def keep(self, page: int, after: Place, block: Block) -> int:
        """Let a page in use be found by its tokens; returns the page that its user has now.

        It is another one if that holds the same already: then the given one is free. So one page
        only holds these tokens there, and whoever uses a page uses those that it follows.
        """
        other = self._kept.find(after, block)
        if other is None:
            self._kept.add(page, after, block)
            return page
        self.share([other])
        self.free([page])
        return other

    def forget(self, pages: Iterable[int]) -> None:
        """Let the idle ones of these pages, and those that follow them, be found no more."""
        for page in pages:
            if page in self._idle:
                self._drop(page)

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Verify that `owned`, the pages of each sequence, the idle and the free make up the pool.

        Raises RuntimeError naming a page that two own though it is not kept, that is owned but free
        or idle, that nobody has, or whose users are miscounted.
        """
        free = set(self._free)
        users: Counter[int] = Counter()
        for pages in owned:
            for page in pages:
                if not 0 < page < self.num_pages:
                    raise RuntimeError(f"page {page} is owned; the pool has 1 to {self.capacity}")
                users[page] += 1
                # Out of order one that several share may be found no more, as what it follows went.
                if users[page] > 1 and page not in self._kept and self._in_order:
                    raise RuntimeError(f"page {page} is owned twice")
            if len(set(pages)) < len(pages):
                raise RuntimeError(f"a sequence has a page twice: {list(pages)}")
        if len(free) != len(self._free):
            raise RuntimeError(f"the free list {sorted(self._free)} names a page twice")
        places: dict[str, Container[int]] = {"owned": users, "idle": self._idle, "free": free}
        for page in range(1, self.num_pages):
            names = [name for name, there in places.items() if page in there]
            if len(names) > 1:
                raise RuntimeError(f"page {page} is {' and '.join(names)}")
            if not names:
                raise RuntimeError(f"page {page} is neither owned nor free")
            if users[page] != self._users[page]:
                raise RuntimeError(
                    f"page {page} has {users[page]} owners and is counted {self._users[page]} times"
                )
            if page in self._kept and page in free:
                raise RuntimeError(f"page {page} is kept and free")
        self._kept.check()
        if self._in_order:
            self._check_order()

    def _check_order(self) -> None:
        """RuntimeError if an idle page would give way before one that follows it."""
        seen: set[Place] = set()
        for page in self._idle:
            if page not in self._kept:
                raise RuntimeError(f"page {page} is idle and not kept")
            if self.key(page)[0] in seen:
                raise RuntimeError(f"page {page} outlasts page {self.key(page)[0]} before it")
            seen.add(page)
        for page in range(1, self.num_pages):
            if self._users[page] and page in self._kept and self.key(page)[0] in seen:
                raise RuntimeError(f"page {page} is in use and follows one that is idle")

    def _evict(self) -> int:
        self.num_evicted += self._drop(next(iter(self._idle)))
        return self._free.pop()

    def _drop(self, page: int) -> int:
        """Let an idle page be found no more, and those that follow it; how many are free then."""
        gone = [one for one in self._kept.remove(page) if one in self._idle]
        for one in reversed(gone):  # so that the page itself is handed out first
            del self._idle[one]
            self._free.append(one)
        return len(gone)

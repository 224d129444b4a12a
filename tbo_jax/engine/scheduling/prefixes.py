"""Which page holds which tokens after which others: found again by what is in it, not by a hash."""

from __future__ import annotations

Block = tuple[int, ...]  # the tokens of a full page
Place = int | str  # what a block follows: the page before it, or at the start the request's salt


class PrefixIndex:
    """Full pages by their tokens and by the page before them, back to the start of a text.

    A page stands for all that comes before it too, so look-ups in a chain find the pages of a text.
    A dictionary compares keys whose hashes are equal. So a hit has the very tokens that were asked
    for, and by the chain the same ones before them, whatever collides.
    """

    def __init__(self) -> None:
        self._pages: dict[tuple[Place, Block], int] = {}
        self._keys: dict[int, tuple[Place, Block]] = {}
        self._following: dict[Place, set[int]] = {}  # the pages right after another one

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, after: Place, block: Block) -> int | None:
        """The page that holds these tokens there, or None."""
        return self._pages.get((after, block))

    def key(self, page: int) -> tuple[Place, Block]:
        """What the page follows, and its tokens. KeyError for one that is not here."""
        return self._keys[page]

    def add(self, page: int, after: Place, block: Block) -> None:
        """Let a page be found. RuntimeError if it is found already, or another one is there."""
        if page in self._keys or (after, block) in self._pages:
            raise RuntimeError(f"page {page} or what it holds after {after!r} is here already")
        self._pages[after, block] = page
        self._keys[page] = after, block
        if isinstance(after, int):
            self._following.setdefault(after, set()).add(page)

    def remove(self, page: int) -> list[int]:
        """Let a page, and those that follow it, be found no more; returns all of them."""
        gone = [page]
        for one in gone:  # which grows
            gone += sorted(self._following.pop(one, ()))
        after = self._keys[page][0]
        if after in self._following:
            self._following[after].discard(page)
            if not self._following[after]:
                del self._following[after]
        for one in gone:
            del self._pages[self._keys.pop(one)]
        return gone

    def check(self) -> None:
        """RuntimeError for a page that follows one that is not here, or is not found by its key."""
        for page, (after, _) in self._keys.items():
            if isinstance(after, int) and after not in self._keys:
                raise RuntimeError(f"page {page} follows page {after}, which is not to be found")
        following: dict[Place, set[int]] = {}
        for page, (after, _) in self._keys.items():
            if isinstance(after, int):
                following.setdefault(after, set()).add(page)
        if following != self._following:
            raise RuntimeError("the pages that follow others are not those of their keys")
        if {page: key for key, page in self._pages.items()} != self._keys:
            raise RuntimeError("the pages by their tokens are not the tokens by their page")

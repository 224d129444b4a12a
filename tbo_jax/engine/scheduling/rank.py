"""One rank of the scheduler: the requests that run there and their pages."""

from __future__ import annotations

from tbo_jax.engine.scheduling.limits import Limits
from tbo_jax.engine.scheduling.pages import PageAllocator
from tbo_jax.engine.scheduling.prefixes import Block, Place
from tbo_jax.engine.scheduling.request import Request


class Rank:
    """Rows and pages of one rank, kept in step: a running request has pages, no other has any.

    With `keeps_pages` full pages can be found by their tokens once they are computed. A request
    starts with those that are there already, and never writes to one: what it computes comes after
    them, in pages of its own.
    """

    def __init__(self, index: int, limits: Limits, keeps_pages: bool) -> None:
        self.index = index
        self.page_size = limits.page_size
        self.max_sequences = limits.max_sequences
        self.keeps_pages = keeps_pages
        self.pages = PageAllocator(limits.num_pages)
        self.running: list[Request] = []  # oldest first

    @property
    def spare(self) -> int:
        """Free pages, less one for each running request, which will want it within page_size steps.

        Measured on mixed loads with pools that run full: leaving these halves the tokens that
        preemption makes anew, for at most 3 % more steps.
        """
        return self.pages.num_free - len(self.running)

    @property
    def wants(self) -> int:
        """Pages that its decodes are short of for the tokens sampled last."""
        return sum(
            self._pages_for(request.num_tokens) - len(request.pages)
            for request in self.running
            if not request.is_prefill
        )

    @property
    def backlog(self) -> int:
        """Tokens of prompts, and of requests that came back, that it has yet to compute."""
        return sum(request.num_uncomputed for request in self.running if request.is_prefill)

    def find(self, request: Request) -> list[int]:
        """Pages that hold what follows the computed tokens of a request, its last token excepted.

        That one is computed in any case: its logits are wanted. And what is computed with it goes
        to a page of its own, so that a page that was found is never written.
        """
        first = request.num_computed // self.page_size
        last = (request.num_tokens - 1) // self.page_size
        return self._find(request, first, last) if self.keeps_pages else []

    def has_room(self, request: Request, found: list[int]) -> bool:
        """Whether a row and pages for a request's tokens are to spare, beside those found."""
        idle = sum(self.pages.is_idle(page) for page in found)
        needed = self._pages_for(request.num_tokens) - len(found) + idle
        return len(self.running) < self.max_sequences and needed <= self.spare

    def place(self, request: Request, found: list[int]) -> None:
        """Start a request that there is room for, with the pages found and others for the rest."""
        self.pages.share(found)
        pages = self.pages.allocate(self._pages_for(request.num_tokens) - len(found))
        assert pages is not None
        request.pages = [*found, *pages]
        request.num_computed = len(found) * self.page_size
        if not request.num_generated:
            request.num_cached = request.num_computed
        request.rank = self.index
        self.running.append(request)
        self.running.sort(key=arrival_of)

    def catch_up(self, request: Request) -> int:
        """Take what others computed of a running request's prompt since; how many tokens that is.

        Its own pages for them are free then, also one that it has begun.
        """
        found = self.find(request)
        if not found:
            return 0
        first = request.num_computed // self.page_size
        own = slice(first, first + len(found))
        self.pages.share(found)
        self.pages.free(request.pages[own])
        request.pages[own] = found
        count = own.stop * self.page_size - request.num_computed
        request.num_computed += count
        if not request.num_generated:
            request.num_cached += count
        return count

    def awaits(self, request: Request) -> bool:
        """Whether the page that a running request is at is about to be computed by an older one.

        It is worth a step or more to wait for it: the older request comes first in each of them.
        """
        at = request.num_computed // self.page_size
        if not self.keeps_pages or at >= (request.num_tokens - 1) // self.page_size:
            return False
        wanted = self._key(request, at)
        for older in self.running:
            if older is request:
                break
            if (
                older.is_prefill
                and older.num_computed // self.page_size == at
                and self._key(older, at) == wanted
            ):
                return True
        return False

    def keep(self, request: Request) -> None:
        """Let the full pages of a running request that are computed be found by their tokens.

        Where another page holds the same, the request goes on with that one. Every token in these
        pages must be known, and nothing may be computed into them again.
        """
        if not self.keeps_pages:
            return
        full = first = request.num_computed // self.page_size
        while first and not self.pages.is_kept(request.pages[first - 1]):
            first -= 1
        for at in range(first, full):
            request.pages[at] = self.pages.keep(request.pages[at], *self._key(request, at))

    def forget(self, request: Request) -> None:
        """Let no page be found that holds tokens of an ended request, as far as nobody uses it."""
        self.pages.forget(self._find(request, 0, request.num_tokens // self.page_size))

    def room(self, request: Request) -> int:
        """How many tokens more a running request has pages for, or would get them."""
        pages = len(request.pages) + self.pages.num_free
        return pages * self.page_size - request.num_tokens

    def grow(self, request: Request, drafts: int = 0) -> bool:
        """See to pages for a running request's newest token and its drafts; False for want of them.

        What drafts took beyond its tokens goes back with `shrink`, before it grows again.
        """
        needed = self._pages_for(request.num_tokens + drafts)
        pages = self.pages.allocate(needed - len(request.pages))
        if pages is None:
            return False
        request.pages += pages
        return True

    def shrink(self) -> None:
        """Free the pages that hold nobody's tokens: those of drafts that were rejected."""
        for request in self.running:
            kept = self._pages_for(request.num_tokens)
            self.pages.free(request.pages[kept:])
            del request.pages[kept:]

    def release(self, request: Request) -> None:
        """Take a running request off, and with its pages what was computed into them."""
        self.running.remove(request)
        self.pages.free(request.pages)
        request.pages = []
        request.num_computed = 0
        request.rank = None

    def check(self) -> None:
        """Verify rows, pages and requests; RuntimeError naming the page or the request."""
        self.pages.check(request.pages for request in self.running)
        if len(self.running) > self.max_sequences:
            raise RuntimeError(
                f"rank {self.index} runs {len(self.running)} requests in {self.max_sequences} rows"
            )
        for request in self.running:
            self._check_kept(request)
            if request.rank != self.index:
                raise RuntimeError(f"rank {self.index} runs {request}, which is of another rank")
            computed, room = request.num_computed, len(request.pages) * self.page_size
            if not (0 <= computed < request.num_tokens and computed <= room):
                raise RuntimeError(f"the pages hold {room} tokens, not those computed of {request}")

    def _check_kept(self, request: Request) -> None:
        """RuntimeError if a page that can be found is not what it says, or would be written."""
        for at, page in enumerate(request.pages):
            if not self.pages.is_kept(page):
                continue
            if at >= request.num_computed // self.page_size:
                raise RuntimeError(f"page {page} can be found, and {request} writes to it")
            if self.pages.key(page) != self._key(request, at):
                raise RuntimeError(f"page {page} is found by other tokens than those of {request}")

    def _key(self, request: Request, at: int) -> tuple[Place, Block]:
        """What the at-th page of a request follows, and its tokens."""
        start = at * self.page_size
        block = tuple(request.token_ids[start : start + self.page_size])
        return request.pages[at - 1] if at else request.salt, block

    def _find(self, request: Request, first: int, last: int) -> list[int]:
        """The kept pages of a request's tokens from its `first` page on, up to before `last`."""
        after: Place = request.pages[first - 1] if first else request.salt
        found: list[int] = []
        for at in range(first, last):
            start = at * self.page_size
            page = self.pages.find(after, tuple(request.token_ids[start : start + self.page_size]))
            if page is None:
                break
            found.append(page)
            after = page
        return found

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def arrival_of(request: Request) -> int:
    """Its place in the order of arrival, which a request has once it was added."""
    assert request.arrival is not None
    return request.arrival

"""One rank of the scheduler: the requests that run there and their pages."""

from __future__ import annotations

from tbo_jax.engine.scheduling.pages import PageAllocator
from tbo_jax.engine.scheduling.request import Request


class Rank:
    """Rows and pages of one rank, kept in step: a running request has pages, no other has any."""

    def __init__(self, index: int, num_pages: int, page_size: int, max_sequences: int) -> None:
        self.index = index
        self.page_size = page_size
        self.max_sequences = max_sequences
        self.pages = PageAllocator(num_pages)
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

    def place(self, request: Request) -> bool:
        """Start a request with pages for all its tokens; False if no row or pages are to spare."""
        needed = self._pages_for(request.num_tokens)
        if len(self.running) == self.max_sequences or needed > self.spare:
            return False
        pages = self.pages.allocate(needed)
        assert pages is not None
        request.pages = pages
        request.rank = self.index
        self.running.append(request)
        self.running.sort(key=arrival_of)
        return True

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
            if request.rank != self.index:
                raise RuntimeError(f"rank {self.index} runs {request}, which is of another rank")
            computed, room = request.num_computed, len(request.pages) * self.page_size
            if not (0 <= computed < request.num_tokens and computed <= room):
                raise RuntimeError(f"the pages hold {room} tokens, not those computed of {request}")

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def arrival_of(request: Request) -> int:
    """Its place in the order of arrival, which a request has once it was added."""
    assert request.arrival is not None
    return request.arrival

"""One rank of the scheduler: the requests that run there and their pages."""

from __future__ import annotations

from bisect import insort

from tbo_jax.engine.scheduling.pages import PageAllocator
from tbo_jax.engine.scheduling.prefixes import Block, Place
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.scheduling.rows import Rows


class Rank:
    """Rows and pages of one rank, kept in step: a running request has pages, no other has any.

    With `keeps_pages` full pages can be found by their tokens once they are computed. A request
    starts with those that are there already, and never writes to one: what it computes comes after
    them, in pages of its own. With `only_prompts` such a page holds tokens of a prompt only, both
    for the request that computes it and for the one that finds it.

    With a `window` a token sees the `window - 1` before it at most, and requests give up the pages
    that none of their next tokens sees (`drop_unseen`).
    """

    def __init__(
        self,
        index: int,
        rows: Rows,
        keeps_pages: bool,
        only_prompts: bool = False,
        window: int | None = None,
    ) -> None:
        self.index = index
        self.limits = rows.limits
        self.page_size = rows.limits.page_size
        self.max_sequences = rows.limits.max_sequences
        self.keeps_pages = keeps_pages
        self.only_prompts = only_prompts
        self.window = window
        self.pages = PageAllocator(rows.limits.num_pages, in_order=window is None)
        self.running: list[Request] = []  # in the order of `turn_of`
        self.prefilling: list[Request] = []  # those of them that do not decode
        self._rows = rows

    @property
    def spare(self) -> int:
        """Free pages, less one for each running request, which will want it within page_size steps.

        Measured on mixed loads with pools that run full: leaving these halves the tokens that
        preemption makes anew, for at most 3 % more steps.
        """
        return self.pages.num_free - len(self.running)

    @property
    def backlog(self) -> int:
        """Tokens of prompts, and of requests that came back, that it has yet to compute."""
        return sum(request.num_uncomputed for request in self.prefilling)

    @property
    def replaying(self) -> list[Request]:
        """Those that have their prompt computed, and not all they had generated when preempted."""
        return [request for request in self.prefilling if not request.num_prompt_left]

    def find(self, request: Request) -> list[int]:
        """Pages that hold what follows the computed tokens of a request, its last token excepted.

        That one is computed in any case: its logits are wanted. And what is computed with it goes
        to a page of its own, so that a page that was found is never written. The same holds for
        tokens of a prompt whose logits are wanted.
        """
        first = request.num_computed // self.page_size
        return self._find(request, first, self._num_findable(request)) if self.keeps_pages else []

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
        request.computed = len(found) * self.page_size
        if not request.num_generated:
            request.num_cached = request.computed
        self._rows.take(request, self.index)
        insort(self.running, request, key=turn_of)
        insort(self.prefilling, request, key=turn_of)
        self.decode(request)

    def decode(self, request: Request) -> bool:
        """Have a prefilling request decode, if no token but its last is to be computed."""
        if request.is_prefill:
            return False
        self.prefilling.remove(request)
        self._rows.load(request)
        return True

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
        request.computed += count
        self._mark_stale(request)
        if not request.num_generated:
            request.num_cached += count
        return count

    def awaits(self, request: Request) -> bool:
        """Whether the page that a running request is at is about to be computed by one before it.

        It is worth a step or more to wait for it: that request comes first in each of them.
        """
        at = request.num_computed // self.page_size
        if not self.keeps_pages or at >= self._num_findable(request):
            return False
        wanted = self._key(request, at)
        for other in self.running:
            if other is request:
                break
            if (
                other.is_prefill
                and other.num_computed // self.page_size == at
                and at < self._may_share(other, other.num_tokens)
                and self._key(other, at) == wanted
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
        full = first = self._may_share(request, request.num_computed)
        while first > request.num_dropped and not self.pages.is_kept(request.pages[first - 1]):
            first -= 1
        # What a page follows must be there, to be found by it.
        if first == full or (first and first == request.num_dropped):
            return
        known = request.token_ids
        for at in range(first, full):
            page = self.pages.keep(request.pages[at], *self._key(request, at, known))
            if page != request.pages[at]:
                request.pages[at] = page
                self._mark_stale(request)

    def forget(self, request: Request) -> None:
        """Let no page be found that holds tokens of an ended request, as far as nobody uses it."""
        self.pages.forget(self._find(request, 0, request.num_tokens // self.page_size))

    def drop_unseen(self, request: Request) -> None:
        """Give up the pages of a running request that its next tokens do not see.

        Two more stay: a token may have to be computed again, and the page before the first one that
        is seen is what that one is found by.
        """
        if self.window is None:
            return
        first = (request.num_computed - self.window + 1) // self.page_size - 2
        if first > request.num_dropped:
            gone = slice(request.num_dropped, first)
            self.pages.free(request.pages[gone])
            request.pages[gone] = [0] * (first - request.num_dropped)
            request.num_dropped = first

    def grow(self, request: Request, num_tokens: int) -> bool:
        """See to pages for so many tokens of a decoding request; False for want of them."""
        needed = self._pages_for(num_tokens) - len(request.pages)
        pages = self.pages.allocate(max(needed, 0))
        if pages is None:
            return False
        request.pages += pages
        self._set_room(request)
        return True

    def stretch(self, request: Request, num_tokens: int) -> int:
        """See to pages for so many tokens of a decoding request, as far as some are to spare.

        Returns:
            How many tokens its pages hold.
        """
        needed = self._pages_for(num_tokens) - len(request.pages)
        wanted = min(needed, self.spare)
        self.grow(request, (len(request.pages) + max(wanted, 0)) * self.page_size)
        return len(request.pages) * self.page_size

    def take_back(self) -> None:
        """Free the pages that hold no token of a decoding request, but were to hold drafts.

        No step may be under way that knows more tokens.
        """
        for request in self.running:
            kept = self._pages_for(request.num_tokens)
            if request.rows is not None and kept < len(request.pages):
                self.pages.free(request.pages[kept:])
                del request.pages[kept:]
                self._set_room(request)

    def release(self, request: Request) -> None:
        """Take a running request off, and with its pages what was computed into them."""
        self.running.remove(request)
        if request.rows is None:
            self.prefilling.remove(request)
        self._rows.release(request)
        self.pages.free(request.pages[request.num_dropped :])
        request.pages = []
        request.computed = request.num_dropped = 0

    def check(self) -> None:
        """Verify rows, pages and requests; RuntimeError naming the page or the request."""
        self.pages.check(request.pages[request.num_dropped :] for request in self.running)
        if len(self.running) > self.max_sequences:
            raise RuntimeError(
                f"rank {self.index} runs {len(self.running)} requests in {self.max_sequences} rows"
            )
        prefilling = [request for request in self.running if request.rows is None]
        if self.prefilling != prefilling:
            raise RuntimeError(f"rank {self.index} lists {self.prefilling} as prefilling")
        for request in self.running:
            self._check_kept(request)
            self._check_row(request)
            if request.rank != self.index:
                raise RuntimeError(f"rank {self.index} runs {request}, which is of another rank")
            computed, room = request.num_computed, len(request.pages) * self.page_size
            if not (0 <= computed < request.num_tokens and computed <= room):
                raise RuntimeError(f"the pages hold {room} tokens, not those computed of {request}")

    def _check_row(self, request: Request) -> None:
        """RuntimeError if a running request does not have its row, or its arrays are others."""
        rows, at = self._rows, (request.rank, request.row)
        if request.row is None or rows.requests[self.index][request.row] is not request:
            raise RuntimeError(f"row {request.row} is not that of {request}")
        if rows.decoding[at] != (request.rows is not None) or request.is_prefill == (
            request.rows is not None
        ):
            raise RuntimeError(f"row {request.row} does not tell whether {request} decodes")
        room = len(request.pages) * self.page_size
        if request.rows is not None and (
            rows.room[at] != room or rows.num_tokens[at] != len(request.token_ids)
        ):
            raise RuntimeError(f"row {request.row} does not have the pages or tokens of {request}")

    def _set_room(self, request: Request) -> None:
        self._rows.room[request.rank, request.row] = len(request.pages) * self.page_size

    def _mark_stale(self, request: Request) -> None:
        self._rows.stale[request.rank, request.row] = True

    def _check_kept(self, request: Request) -> None:
        """RuntimeError if a page that can be found is not what it says, or would be written."""
        if any(request.pages[: request.num_dropped]):
            raise RuntimeError(f"{request} has pages that it gave up")
        for at, page in enumerate(request.pages):
            if not self.pages.is_kept(page):
                continue
            if at >= request.num_computed // self.page_size:
                raise RuntimeError(f"page {page} can be found, and {request} writes to it")
            after, block = self._key(request, at)
            if at and at == request.num_dropped:
                after = self.pages.key(page)[0]  # the request does not know any more
            if self.pages.key(page) != (after, block):
                raise RuntimeError(f"page {page} is found by other tokens than those of {request}")

    def _key(
        self, request: Request, at: int, token_ids: list[int] | None = None
    ) -> tuple[Place, Block]:
        """What the at-th page of a request follows, and its tokens; `token_ids` if given."""
        start, known = at * self.page_size, request.token_ids if token_ids is None else token_ids
        block = tuple(known[start : start + self.page_size])
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

    def _num_findable(self, request: Request) -> int:
        """Leading pages of a request that it may take from others."""
        return self._may_share(request, min(request.num_tokens - 1, request.num_findable))

    def _may_share(self, request: Request, num_tokens: int) -> int:
        """How many pages that its first tokens fill may be found, or shared with others."""
        if self.only_prompts:
            num_tokens = min(num_tokens, len(request.prompt_token_ids))
        return num_tokens // self.page_size

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def turn_of(request: Request) -> tuple[int, int]:
    """What requests are ordered by, once they were added: priority, then arrival."""
    assert request.arrival is not None
    return request.priority, request.arrival

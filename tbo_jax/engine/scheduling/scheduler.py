"""Which tokens the next step computes, on which rank, and in which cache pages.

Attention is data-parallel: each rank has its own rows, page pool and token budget, and a request
stays on one rank until it finishes or is preempted. One waiting queue serves all ranks. A step is

1. the decodes of each rank, one token each, oldest request first. One that gets no page preempts
   the youngest request running on its rank (itself, if that is the youngest): its pages are freed
   and it waits again, before all younger ones, keeping its tokens, which are computed anew later;
2. the prefills under way, oldest first, in chunks of what is left of the rank's token budget;
3. admissions in order of arrival (`choose_rank`).

Full pages are kept when their request ends, and found again by their tokens (`PageAllocator`), so
that requests that begin alike compute that once on each rank. A prefill takes what is there already
when it is admitted and before each of its chunks; where an older prefill of its rank is about to
compute the page that it is at, it waits for that one.

All pages for the tokens that a request has are taken when it is admitted, so that prefills never
want pages and only decodes preempt.

No request starves. Take the oldest unfinished one.
- It is not preempted: on its rank the youngest goes, and alone it fits, because a request is over
  when it fills a whole pool.
- Decoding, it is in every step: the budget covers all rows. Prefilling, it gets at least one token
  in every step: it is first, waits for no older one, and decodes use at most the budget of the
  other rows.
- Waiting, it is admitted at once. On the rank that preempted it only older requests were left, and
  they have finished; if it never ran, all that ran is older and has finished. Nothing younger is
  admitted before it. So there is an empty rank, and there all pages are free or give way.
It has finitely many tokens, so it finishes, and the next one is the oldest.

A step can be planned while the tokens of the last are still on the device (`advance`), as if no
request stopped but those whose length is reached. One that did stop leaves a dead row in the plan.
The device runs the steps in order, each taking the cache that the one before returns. That makes
these things safe:
- A page is kept when the step that fills it is advanced, so it was dispatched: whoever finds it
  reads later. In the step that fills it nobody finds it. Its tokens are known then: only the last
  one may not be, and that one is computed by the next step.
- Nothing writes to a kept page. A request writes from its first token that is not computed on, and
  keeps the pages before that; so does its dead row, which is of a later step than those advanced.
- The other pages of a dead row can go to others at once, although it writes to them: whoever gets
  them writes later, and reads only what it wrote. So can a page that is evicted, or given up for
  one with the same tokens, although an earlier step reads it.
- A step that failed takes all pages with it (`start_over`).
Nothing is preempted ahead: its tokens are needed to admit it again.

Decodes may verify drafts beside their token (`schedule`), where the step computes no prompt. Drafts
take what budget and pages are left over; the slots of those that are rejected are overwritten by
the tokens that come in their place, before any query reads them. The token before them may have to
be computed again too, so the pages of such a row are kept only when its tokens are known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from tbo_jax.engine.scheduling.books import check_books
from tbo_jax.engine.scheduling.limits import Limits
from tbo_jax.engine.scheduling.placement import choose_rank
from tbo_jax.engine.scheduling.plan import Propose, RankStep, SchedulerStatistics, StepPlan
from tbo_jax.engine.scheduling.rank import Rank, arrival_of
from tbo_jax.engine.scheduling.request import FinishReason, Request, unread_token
from tbo_jax.overlap.checks import whole_number


class Scheduler:
    """Requests in, step plans out. `add`, then in turn `schedule`, run the model, `commit`.

    A step ahead: `schedule`, then in turn `advance`, `schedule` the next, `commit` the first.

    Args:
        num_ranks: ranks, each with its own pages and rows.
        num_pages: pages of each rank's pool, page 0 (padding) included.
        page_size: tokens a page holds.
        max_sequences: rows of a rank: requests that run there at a time.
        max_tokens: most tokens that a rank computes in a step, at least max_sequences.
        max_context: most tokens of a request, prompt and generated together.
        prefix_cache: keep full pages, and find them again.

    Raises ValueError for a size that cannot work.
    """

    def __init__(
        self,
        num_ranks: int,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        max_tokens: int,
        max_context: int,
        prefix_cache: bool = True,
    ) -> None:
        whole_number("num_ranks", num_ranks, 1)
        self.limits = Limits(page_size, num_pages, max_sequences, max_tokens, max_context)
        self.statistics = SchedulerStatistics()
        self._keeps_pages = prefix_cache
        self._ranks = self._new_ranks(num_ranks)
        self._requests: dict[int, Request] = {}  # the unfinished ones
        self._waiting: deque[Request] = deque()  # oldest first
        self._ending: list[Request] = []  # all computed, and the last token is not read yet
        self._num_arrived = 0
        self._open_plan: StepPlan | None = None
        self._unread_plan: StepPlan | None = None  # advanced, not committed

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._requests)

    @property
    def must_preempt(self) -> bool:
        """Whether the next step is short of pages, and with that cannot be planned ahead."""
        return any(rank.wants > rank.pages.num_free for rank in self._ranks)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises ValueError, and changes nothing, if its id is that of an unfinished request, it is
        not new, or its prompt is empty or leaves no room for a token in the context or a rank's
        pages.
        """
        name = f"request {request.request_id}"
        if request.request_id in self._requests:
            raise ValueError(f"{name} exists already and is unfinished; expected another id")
        if request.arrival is not None or request.is_finished:
            raise ValueError(f"{name} was added before; expected a new one")
        self.limits.check_prompt(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self, propose: Propose | None = None) -> StepPlan:
        """Plan a step and take its pages; `advance`, `commit` or `discard` it before the next one.

        With `propose`, a step that computes no prompt verifies drafts. The plan is empty only if
        there is nothing to compute. RuntimeError if the last plan is still open, or if the tokens
        of an advanced one are not known and this one has to preempt, or drafts are in play.
        """
        if self._open_plan is not None:
            raise RuntimeError("the last plan is open: neither committed nor discarded")
        if self._unread_plan is not None and self.must_preempt:
            raise RuntimeError("a step that must preempt is not planned before the last's commit")
        if self._unread_plan is not None and (propose or self._unread_plan.num_drafts):
            raise RuntimeError("with drafts no step is planned before the last's commit")
        evicted = self._num_evicted
        steps = [RankStep(self.limits.max_tokens) for _ in self._ranks]
        for rank, step in zip(self._ranks, steps, strict=True):
            for request in [r for r in rank.running if not r.is_prefill]:
                if request.rank is not None and self._grow(rank, request):
                    step.add(request)
            for request in rank.running:
                if request.is_prefill and step.budget:
                    self.statistics.cached_tokens += rank.catch_up(request)
                    if not rank.awaits(request):
                        step.add(request)
        self._admit(steps)
        if propose is not None and all(step.decodes_only for step in steps):
            for rank, step in zip(self._ranks, steps, strict=True):
                step.add_drafts(rank, self.limits, propose)
        self.statistics.evictions += self._num_evicted - evicted
        plan = StepPlan(tuple(step.in_order for step in steps))
        if len(self._requests) > len(self._ending) and not plan.sequences:
            raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can run")
        self._open_plan = plan
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Go on as if the plan was run and no new token stopped a request; then `commit` it.

        An `unread_token` stands for each new token until then. A request whose length ends with it
        gives up its rank and pages. RuntimeError if this is not the open plan, or another one was
        advanced and not committed.
        """
        self._expect_open(plan)
        if self._unread_plan is not None:
            raise RuntimeError("the plan advanced before was not committed")
        self._open_plan, self._unread_plan = None, plan
        for rank, sequences in zip(self._ranks, plan.ranks, strict=True):
            for row, sequence in enumerate(sequences):
                request = sequence.request
                if request.is_finished:
                    continue
                if request.is_prefill:
                    self.statistics.prefill_tokens += sequence.num_tokens
                else:
                    self.statistics.decode_tokens += sequence.num_tokens
                request.num_computed += sequence.num_tokens - len(sequence.drafts)
                if not sequence.drafts:
                    rank.keep(request)
                if not sequence.samples:
                    continue
                request.token_ids.append(unread_token(row))
                if self.limits.is_reached(request):
                    rank.release(request)
                    self._ending.append(request)

    def commit(
        self,
        plan: StepPlan,
        sampled: Mapping[int, Sequence[int]],
        stopped: Collection[int] = (),
        failed: Mapping[int, str] = MappingProxyType({}),
    ) -> list[Request]:
        """Record what the plan gave; returns the requests that it finishes, in plan order.

        Args:
            plan: the advanced one, or if there is none the last one of `schedule`.
            sampled: request id -> new tokens, of every sequence that samples: the drafts that were
                accepted, and one more. Fewer if one of them ends the request; a sequence with
                drafts may have fewer anyway, or none, and then is at that place again.
            stopped: ids of requests that their last token ends (end of sequence, a stop string).
                They finish with "stop". Others finish with "length" when they have all the tokens
                they asked for, fill the context, or fill all the pages of a rank.
            failed: request id -> why, of those that have no token. They finish with "error".

        Sequences whose request was finished or aborted since `schedule` are passed over. Raises
        RuntimeError for another plan; ValueError, changing nothing, for ids or numbers of tokens
        that do not match it.
        """
        if plan is not self._unread_plan:
            self._expect_open(plan)
        plan.check_sampled(sampled, stopped, failed)
        if plan is not self._unread_plan:
            self.advance(plan)
        self._unread_plan = None
        self.statistics.steps += 1
        finished = []
        for sequence in plan.sequences:
            request = sequence.request
            if not sequence.samples or request.is_finished:
                continue
            tokens = sampled[request.request_id]
            request.token_ids[-1:] = tokens
            if sequence.drafts and request.rank is not None:
                request.num_computed += len(tokens) - 1
                self._ranks[request.rank].keep(request)
            self.statistics.generated_tokens += len(tokens)
            if request.request_id in failed:
                self.finish(request, "error", failed[request.request_id])
            elif request.request_id in stopped:
                self.finish(request, "stop")
            elif self.limits.is_reached(request):
                self.finish(request, "length")
            else:
                continue
            finished.append(request)
        for rank in self._ranks:
            rank.shrink()
        return finished

    def discard(self, plan: StepPlan) -> None:
        """Drop a plan that was not run, or failed; what it would have computed is planned again."""
        self._expect_open(plan)
        self._open_plan = None
        for rank in self._ranks:
            rank.shrink()

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request that runs or waits, and free its pages. RuntimeError if it does neither.

        With "error" its pages are not kept, unless others use them: what is in them may be wrong.
        """
        if self._requests.get(request.request_id) is not request:
            raise RuntimeError(f"request {request.request_id} neither runs nor waits")
        request.finish_reason = reason
        request.error = error
        if request.rank is not None:
            self._ranks[request.rank].release(request)
        else:
            queue = self._ending if request in self._ending else self._waiting
            queue.remove(request)
        if request.has_unread:
            request.token_ids.pop()
        if reason == "error":
            for rank in self._ranks:
                rank.forget(request)
        del self._requests[request.request_id]
        self.statistics.finished[reason] += 1

    def start_over(self) -> None:
        """Forget all plans and pages: a step failed. All requests wait, with their tokens so far.

        Whatever else the failure left half done is put right.
        """
        self._open_plan = self._unread_plan = None
        self._ranks = self._new_ranks(len(self._ranks))
        self._ending.clear()
        self._requests = {i: r for i, r in self._requests.items() if not r.is_finished}
        self._waiting = deque(self._requests.values())  # which are in order of arrival
        for request in self._waiting:
            request.rank, request.pages, request.num_computed = None, [], 0
            if request.has_unread:
                request.token_ids.pop()

    def forget_pages(self) -> None:
        """Keep no page any longer. RuntimeError while a request is unfinished."""
        if self.has_work:
            raise RuntimeError(
                f"{len(self._requests)} requests are unfinished, and use their pages"
            )
        self._ranks = self._new_ranks(len(self._ranks))

    def abort(self, request_id: int) -> Request | None:
        """End an unfinished request with "abort" and return it; None if the id has none."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def check(self) -> None:
        """Verify the books: RuntimeError naming the page or request that does not add up."""
        check_books(self._ranks, list(self._waiting), self._ending, self._requests)

    def _new_ranks(self, count: int) -> list[Rank]:
        return [Rank(index, self.limits, self._keeps_pages) for index in range(count)]

    @property
    def _num_evicted(self) -> int:
        return sum(rank.pages.num_evicted for rank in self._ranks)

    def _expect_open(self, plan: StepPlan) -> None:
        if plan is not self._open_plan:
            raise RuntimeError("this is not the open plan")

    def _grow(self, rank: Rank, request: Request) -> bool:
        """Get a decode its page, preempting for it; False if it had to preempt itself."""
        while not rank.grow(request):
            youngest = rank.running[-1]
            if youngest is rank.running[0]:
                raise RuntimeError(f"request {request.request_id} outgrew the pages of its rank")
            self._preempt(rank, youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, rank: Rank, request: Request) -> None:
        self.statistics.preemptions += 1
        self.statistics.discarded_tokens += request.num_computed
        request.num_preemptions += 1
        rank.release(request)
        place = bisect_left(self._waiting, arrival_of(request), key=arrival_of)
        self._waiting.insert(place, request)

    def _admit(self, steps: list[RankStep]) -> None:
        while self._waiting:
            open_ranks = [
                rank
                for rank, step in zip(self._ranks, steps, strict=True)
                if step.budget and len(rank.running) < rank.max_sequences
            ]
            choice = choose_rank(open_ranks, self._waiting[0])
            if choice is None:
                return
            rank, found = choice
            request = self._waiting.popleft()
            rank.place(request, found)
            self.statistics.admissions += 1
            self.statistics.cached_tokens += request.num_computed
            if not rank.awaits(request):
                steps[rank.index].add(request)

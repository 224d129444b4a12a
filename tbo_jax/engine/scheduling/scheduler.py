"""Which tokens the next step computes, on which rank, and in which cache pages.

Attention is data-parallel: each rank has its own rows, page pool and token budget, and a request
stays on one rank until it finishes or is preempted. One waiting queue serves all ranks. A step is

1. the decodes of each rank, one token each, oldest request first. One that gets no page preempts
   the youngest request running on its rank (itself, if that is the youngest): its pages are freed
   and it waits again, before all younger ones, keeping its tokens, which are computed anew later;
2. the prefills under way, oldest first, in chunks of what is left of the rank's token budget;
3. admissions in order of arrival, each to the rank with most pages to spare.

All pages for the tokens that a request has are taken when it is admitted, so that prefills never
want pages and only decodes preempt.

No request starves. Take the oldest unfinished one.
- It is not preempted: on its rank the youngest goes, and alone it fits, because a request is over
  when it fills a whole pool.
- Decoding, it is in every step: the budget covers all rows. Prefilling, it gets at least one token
  in every step: it is first, and decodes use at most the budget of the other rows.
- Waiting, it is admitted at once. On the rank that preempted it only older requests were left, and
  they have finished; if it never ran, all that ran is older and has finished. Nothing younger is
  admitted before it. So there is an empty rank.
It has finitely many tokens, so it finishes, and the next one is the oldest.

A step can be planned while the tokens of the last are still on the device (`advance`), as if no
request stopped but those whose length is reached. One that did stop leaves a dead row in the plan.
Its pages can go to others at once, although the dead row writes to them: the device runs the steps
in order, each taking the cache that the one before returns, so whoever gets the pages writes later,
and reads only what it wrote. Nothing is preempted ahead: its tokens are needed to admit it again.

Decodes may verify drafts beside their token (`schedule`), where the step computes no prompt. Drafts
take what budget and pages are left over; the slots of those that are rejected are overwritten by
the tokens that come in their place, before any query reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from tbo_jax.engine.scheduling.books import check_books
from tbo_jax.engine.scheduling.limits import Limits
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
    ) -> None:
        whole_number("num_ranks", num_ranks, 1)
        self.limits = Limits(page_size, num_pages, max_sequences, max_tokens, max_context)
        self.statistics = SchedulerStatistics()
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
        steps = [RankStep(self.limits.max_tokens) for _ in self._ranks]
        for rank, step in zip(self._ranks, steps, strict=True):
            for request in [r for r in rank.running if not r.is_prefill]:
                if request.rank is not None and self._grow(rank, request):
                    step.add(request)
            for request in rank.running:
                if request.is_prefill and step.budget:
                    step.add(request)
        self._admit(steps)
        if propose is not None and all(step.decodes_only for step in steps):
            for rank, step in zip(self._ranks, steps, strict=True):
                step.add_drafts(rank, self.limits, propose)
        plan = StepPlan(tuple(tuple(step.sequences) for step in steps))
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
            self.statistics.generated_tokens += len(tokens)
            if request.request_id in failed:
                self.finish(request, "error", failed[request.request_id])
            elif request.request_id in stopped:
                self.finish(request, "stop")
            elif self.limits.is_reached(request):
                self.finish(request, "length")
            else:
                request.num_computed += len(tokens) - 1
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
        """End a request that runs or waits, and free its pages. RuntimeError if it does neither."""
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
        limits = self.limits
        sizes = limits.num_pages, limits.page_size, limits.max_sequences
        return [Rank(index, *sizes) for index in range(count)]

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
            rank = max(open_ranks, key=lambda rank: rank.spare, default=None)
            if rank is None or not rank.place(self._waiting[0]):
                return
            steps[rank.index].add(self._waiting.popleft())
            self.statistics.admissions += 1

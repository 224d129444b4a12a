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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from tbo_jax.engine.plan import ScheduledSequence, SchedulerStatistics, StepPlan
from tbo_jax.engine.rank import Rank, arrival_of
from tbo_jax.engine.request import FinishReason, Request


class Scheduler:
    """Requests in, step plans out. `add`, then in turn `schedule`, run the model, `commit`.

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
        sizes = {"num_ranks": num_ranks, "page_size": page_size, "max_sequences": max_sequences}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")
        if max_tokens < max_sequences:
            raise ValueError(
                f"max_tokens is {max_tokens}; expected at least max_sequences, {max_sequences}, "
                "so that a step has room for every row's next token"
            )
        if max_context < 2:
            raise ValueError(f"max_context is {max_context}; expected 2 or more")
        self.max_tokens = max_tokens
        self.max_context = max_context
        self.statistics = SchedulerStatistics()
        self._ranks = [Rank(i, num_pages, page_size, max_sequences) for i in range(num_ranks)]
        self._pool_tokens = self._ranks[0].pages.capacity * page_size
        self._requests: dict[int, Request] = {}  # the unfinished ones
        self._waiting: deque[Request] = deque()  # oldest first
        self._num_arrived = 0
        self._open_plan: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._requests) - len(self._waiting)

    @property
    def num_free_pages(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(rank.pages.num_free for rank in self._ranks)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises ValueError, and changes nothing, if its id is that of an unfinished request, it is
        not new, or its prompt is empty or leaves no room for a token in the context or a rank's
        pages.
        """
        name, length = f"request {request.request_id}", len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise ValueError(f"{name} exists already and is unfinished; expected another id")
        if request.arrival is not None or request.is_finished:
            raise ValueError(f"{name} was added before; expected a new one")
        if length == 0:
            raise ValueError(f"{name} has an empty prompt; expected 1 token or more")
        if length > self.max_context - 1:
            raise ValueError(
                f"{name} has a prompt of {length} tokens; expected at most {self.max_context - 1}, "
                f"which leaves room for one more in a context of {self.max_context}"
            )
        if length > self._pool_tokens - 1:
            raise ValueError(
                f"{name} has a prompt of {length} tokens; expected at most "
                f"{self._pool_tokens - 1}, which leaves room for one more in the "
                f"{self._pool_tokens} of a rank's pages"
            )
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self) -> StepPlan:
        """Plan the next step and take its pages; `commit` or `discard` it before the next one.

        The plan is empty only if there is no work. RuntimeError if the last plan is still open.
        """
        if self._open_plan is not None:
            raise RuntimeError("the last plan was neither committed nor discarded")
        steps = [_RankStep(self.max_tokens) for _ in self._ranks]
        for rank, step in zip(self._ranks, steps, strict=True):
            for request in [r for r in rank.running if not r.is_prefill]:
                if request.rank is not None and self._grow(rank, request):
                    step.add(request)
            for request in rank.running:
                if request.is_prefill and step.budget:
                    step.add(request)
        self._admit(steps)
        plan = StepPlan(tuple(tuple(step.sequences) for step in steps))
        if self._requests and not plan.sequences:
            raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can run")
        self._open_plan = plan
        return plan

    def commit(
        self, plan: StepPlan, sampled: Mapping[int, int], stopped: Collection[int] = ()
    ) -> list[Request]:
        """Record that the plan was run; returns the requests that it finishes, in plan order.

        Args:
            plan: the last one of `schedule`.
            sampled: request id -> new token, of every sequence that samples.
            stopped: ids of requests that their new token ends (end of sequence, a stop string).
                They finish with "stop". Others finish with "length" when they have all the tokens
                they asked for, fill the context, or fill all the pages of a rank.

        Sequences whose request was finished or aborted since `schedule` are passed over. Raises
        RuntimeError for another plan; ValueError, changing nothing, for ids that do not match it.
        """
        self._expect_open(plan)
        sampling = {s.request.request_id: s.request for s in plan.sequences if s.samples}
        required = {i for i, request in sampling.items() if not request.is_finished}
        if not required <= sampled.keys() <= sampling.keys():
            raise ValueError(
                f"got tokens of requests {sorted(sampled)}; expected {sorted(required)}"
            )
        if not sampled.keys() >= set(stopped):
            raise ValueError(f"requests {sorted(stopped)} stopped; expected some of the sampled")
        self._open_plan = None
        self.statistics.steps += 1
        finished = []
        for sequence in plan.sequences:
            request = sequence.request
            if request.is_finished:
                continue
            if request.is_prefill:
                self.statistics.prefill_tokens += sequence.num_tokens
            else:
                self.statistics.decode_tokens += sequence.num_tokens
            request.num_computed += sequence.num_tokens
            if not sequence.samples:
                continue
            request.token_ids.append(int(sampled[request.request_id]))
            self.statistics.generated_tokens += 1
            if request.request_id in stopped:
                self.finish(request, "stop")
                finished.append(request)
            elif self._is_full(request):
                self.finish(request, "length")
                finished.append(request)
        return finished

    def discard(self, plan: StepPlan) -> None:
        """Drop a plan that was not run, or failed; what it would have computed is planned again."""
        self._expect_open(plan)
        self._open_plan = None

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request that runs or waits, and free its pages. RuntimeError if it does neither."""
        if self._requests.get(request.request_id) is not request:
            raise RuntimeError(f"request {request.request_id} neither runs nor waits")
        if request.rank is None:
            self._waiting.remove(request)
        else:
            self._ranks[request.rank].release(request)
        del self._requests[request.request_id]
        request.finish_reason = reason
        request.error = error
        self.statistics.finished[reason] += 1

    def abort(self, request_id: int, error: str = "aborted") -> Request | None:
        """End an unfinished request with an error and return it; None if the id has none."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "error", error)
        return request

    def check(self) -> None:
        """Verify the books: RuntimeError naming the page or request that does not add up."""
        for rank in self._ranks:
            rank.check()
        for request in self._waiting:
            if request.rank is not None or request.pages or request.num_computed:
                raise RuntimeError(f"{request} waits, but has a rank, pages or computed tokens")
        queues = [list(self._waiting), *(rank.running for rank in self._ranks)]
        for queue in queues:
            if queue != sorted(queue, key=arrival_of):
                raise RuntimeError(f"{[r.request_id for r in queue]} are out of order of arrival")
        held = sorted(request.request_id for queue in queues for request in queue)
        if held != sorted(self._requests):
            raise RuntimeError(f"{held} run or wait; unfinished are {sorted(self._requests)}")

    def _expect_open(self, plan: StepPlan) -> None:
        if plan is not self._open_plan:
            raise RuntimeError("this is not the open plan")

    def _is_full(self, request: Request) -> bool:
        limit = min(self.max_context, self._pool_tokens)
        return request.num_generated >= request.params.max_new_tokens or request.num_tokens >= limit

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
        # Waiting requests that are older were preempted too, so there are few.
        place = 0
        while place < len(self._waiting) and arrival_of(self._waiting[place]) < arrival_of(request):
            place += 1
        self._waiting.insert(place, request)

    def _admit(self, steps: list[_RankStep]) -> None:
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


class _RankStep:
    """A rank's part of the plan under construction."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[ScheduledSequence] = []

    def add(self, request: Request) -> None:
        """Schedule as many of its tokens as the budget has room for."""
        num_tokens = min(request.num_uncomputed, self.budget)
        self.budget -= num_tokens
        samples = num_tokens == request.num_uncomputed
        self.sequences.append(ScheduledSequence(request, num_tokens, samples))

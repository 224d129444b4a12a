"""Which tokens the next step computes, on which rank, and in which cache pages.

Attention is data-parallel: each rank has its own rows, page pool and token budget, and a request
stays on one rank until it finishes or is preempted. One waiting queue serves all ranks. Requests
have an order: of priority, the lower number first, and among equals of arrival. A step is

1. the decodes of each rank, one token each, in that order. One that gets no page preempts the last
   request running on its rank (itself, if that is the last): its pages are freed and it waits
   again, in its place in the order, keeping its tokens, which are computed anew later;
2. the prefills under way, in order, in chunks of what is left of the rank's token budget;
3. admissions in order (`choose_rank`). Nothing is preempted for them.

This is vLLM's priority scheduling.

Full pages are kept when their request ends, and found again by their tokens (`PageAllocator`), so
that requests that begin alike compute that once on each rank. A prefill takes what is there already
when it is admitted and before each of its chunks; where a prefill of its rank that is before it in
the order is about to compute the page that it is at, it waits for that one.

A request that wants log-probabilities of its prompt (`Request.num_findable`) takes none of the
pages whose tokens' logits it lacks, and computes these tokens; others find them as usual.

All pages for the tokens that a request has are taken when it is admitted, so that prefills never
want pages and only decodes preempt. Where all layers have a sliding window, a request gives up
pages that its tokens see no more before it takes others. What a step that is under way reads of
them is there until whoever gets them writes, which is later.

No request starves behind those of its own priority, and of a higher number. Behind lower numbers
it does, while such requests keep coming and fill all ranks: nothing ages. Take a rank, and the
first in order of those that run there.
- It is not preempted: the last goes, and alone it fits, because a request is over when it fills a
  whole pool.
- Decoding, it is in every step: the budget covers all rows. Prefilling, it gets at least one token
  in every step: it is first, waits for no other, and decodes use at most the budget of the other
  rows.
So on each rank with requests one moves on in every step, and they have finitely many tokens. Now
take the first in order of all unfinished requests, and let none come that goes before it.
- Running, it is the first on its rank, and finishes.
- Waiting, nothing is admitted before it. So the ranks empty, at the latest until one has none:
  there all pages are free or give way, and it is admitted. (With one priority for all it is
  admitted at once: all that ever ran beside it came before it, and has finished.)
It finishes, and the next one is the first.

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

With `deterministic` a token is always computed by the same program, whatever runs beside it: those
of prompts in steps that compute prompts only, generated ones in steps that decode only. Steps of
the two kinds take turns while there is work for both. A request that was preempted prefills its
prompt and then decodes again what it had generated, a known token in each step (a *replay*). Only
pages of prompts are kept, and found for prompts only, as a page of generated tokens holds what
decodes computed. The oldest request is in every step of its kind, and every other step at least is
of that kind, so none starves. Replays and prompts are both `prefills` of a plan.

Decodes may verify drafts beside their token. Drafts take pages that are to spare, and beside
prompts half of the budget that the other rows leave. The slots of those that are rejected are
overwritten by the tokens that come in their place, before any query reads them. The token before
them may have to be computed again too, so the pages of such a row are kept only when its tokens are
known.

A step that is planned while such drafts are judged takes them all for right (`Rows.slack`): it has
pages for as many tokens, and drafts only as far as none can go beyond its limit. So it is right
whatever stands. Where the tokens turn out not to be those that the device went on from, what the
next step samples of that row does not count (`StepPlan.is_live`), and the row is told anew.

Whether the device finds drafts of use is known when they were judged. A sequence whose drafts were
of no use is next drafted for after 2 steps, then 4, up to `MOST_WAIT`; at the same steps as others
of its kind, so that between them steps are decodes, which cost less than those that verify.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np

from tbo_jax.engine.scheduling.books import check_books
from tbo_jax.engine.scheduling.limits import Limits
from tbo_jax.engine.scheduling.placement import choose_rank
from tbo_jax.engine.scheduling.plan import Propose, RankStep, SchedulerStatistics, StepPlan
from tbo_jax.engine.scheduling.rank import Rank, turn_of
from tbo_jax.engine.scheduling.request import FinishReason, Request, unread_token
from tbo_jax.engine.scheduling.rows import NOBODY, Rows
from tbo_jax.overlap.checks import whole_number

MOST_WAIT = 32  # steps, of a sequence whose drafts are of no use


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
        deterministic: have prompts and decodes in steps of their own (see above).
        max_drafts: drafts that the device finds for a decode, at most.
        window: a token sees the `window - 1` before it at most; None: all.

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
        deterministic: bool = False,
        max_drafts: int = 0,
        window: int | None = None,
    ) -> None:
        whole_number("num_ranks", num_ranks, 1)
        self.limits = Limits(page_size, num_pages, max_sequences, max_tokens, max_context)
        self.statistics = SchedulerStatistics()
        self._keeps_pages = prefix_cache
        self._deterministic = deterministic
        self._max_drafts = max_drafts
        self._window = window
        self._had_prompts = False  # the last step, and no decodes
        self._new_ranks(num_ranks)
        self._requests: dict[int, Request] = {}  # the unfinished ones
        self._waiting: deque[Request] = deque()  # in the order of `turn_of`
        # All computed, and the last token is not read yet; by id.
        self._ending: dict[int, Request] = {}
        self._num_arrived = 0
        self._open_plan: StepPlan | None = None
        self._unread_plan: StepPlan | None = None  # advanced, not committed

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._requests)

    @property
    def load(self) -> dict[str, int]:
        """Requests that have a row and that wait for one, and pages of all ranks, in all and free.

        It may be read while another thread plans a step, and is then of the time before or after.
        """
        running = int((self.rows.request_ids != NOBODY).sum())
        return {
            "running": running,
            "waiting": max(0, len(self._requests) - running),
            "pages": len(self._ranks) * (self.limits.num_pages - 1),
            "free_pages": sum(rank.pages.num_free for rank in self._ranks),
        }

    @property
    def must_preempt(self) -> bool:
        """Whether the next step is short of pages, and with that cannot be planned ahead."""
        wanted = self.rows.num_wanted().tolist()
        return any(
            count > rank.pages.num_free
            for count, rank in zip(wanted, self._ranks, strict=True)
            if count
        )

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
        self._wait(request)

    def schedule(self, propose: Propose | None = None) -> StepPlan:
        """Plan a step and take its pages; `advance`, `commit` or `discard` it before the next one.

        With `propose`, decodes verify the drafts that it gives, and not those of the device. The
        plan is empty only if there is nothing to compute. RuntimeError if the last plan is still
        open, or if the tokens of an advanced one are not known and this one has to preempt, or
        `propose` would need them.
        """
        if self._open_plan is not None:
            raise RuntimeError("the last plan is open: neither committed nor discarded")
        if self._unread_plan is not None and self.must_preempt:
            raise RuntimeError("a step that must preempt is not planned before the last's commit")
        if self._unread_plan is not None and propose is not None:
            raise RuntimeError("drafts are not proposed before the last's commit")
        evicted = self._num_evicted
        held: dict[Request, int] = {}  # pages of those that get more
        prompts = self._prompts() if self._deterministic else None
        self._had_prompts = prompts is not None
        drafts: np.ndarray | None = None
        proposed: dict[Request, tuple[int, ...]] = {}
        if prompts is not None:
            steps = prompts
        else:
            steps = self._decodes(held)
            if propose is not None or self._max_drafts:
                drafts, proposed = self._draft(steps, held, propose)
            if self._deterministic:
                self._replay(steps)
            else:
                self._prefill(steps)
        self.statistics.evictions += self._num_evicted - evicted
        new_pages: list[tuple[int, int, int, int]] = []
        for request, first in held.items():
            if request.rows is not None:  # not preempted, and perhaps back as a prefill
                assert request.rank is not None and request.row is not None
                pages = enumerate(request.pages[first:], first)
                new_pages += [(request.rank, request.row, at, page) for at, page in pages]
        prefills = [step.prefills for step in steps]
        plan = StepPlan(
            self.rows,
            prefills,
            drafts,
            self._max_drafts,
            proposed,
            new_pages,
            with_decodes=prompts is None,
        )
        if len(self._requests) > len(self._ending) and not plan.has_work:
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
        rows, page_size = self.rows, self.limits.page_size
        decodes = slice(int(plan.num_decodes.sum()))
        of, numbers = plan.sampled, np.arange(decodes.stop)
        here = rows.hold(of.at[decodes], of.request_ids[decodes])
        here &= plan.is_live[decodes]
        if not here.all():  # aborted meanwhile
            numbers = numbers[here]
        at, drafts = of.at[numbers], plan.num_drafts[numbers]
        self.statistics.decode_tokens += len(numbers) + int(drafts.sum())
        computed = rows.num_tokens.take(at)
        rows.await_tokens(at, of.places[numbers], drafts)
        # The pages of a row with drafts are kept when its tokens are known.
        for number in numbers[(computed % page_size == 0) & (drafts == 0)].tolist():
            self._ranks[of.ranks[number]].keep(of.requests[number])
        for number in numbers[computed + 1 >= rows.limit.take(at)].tolist():
            self._end(self._ranks[of.ranks[number]], of.requests[number])
        for rank, prefills, count in zip(
            self._ranks, plan.prefills, plan.num_decodes.tolist(), strict=True
        ):
            for place, sequence in enumerate(prefills, count):
                request = sequence.request
                if request.is_finished:
                    continue
                self.statistics.prefill_tokens += sequence.num_tokens
                request.computed += sequence.num_tokens
                rank.keep(request)
                if sequence.samples:
                    request.known.append(unread_token(place))
                    if request.num_tokens >= self.limits.most_tokens(request):
                        self._end(rank, request)
                        continue
                rank.decode(request)

    def awaits(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Which sequences of `plan.sampled` still want their tokens, bool [N], and their flags."""
        of = plan.sampled
        here = self.rows.hold(of.at, of.request_ids)
        flags = self.rows.flags.take(of.at)
        for number in np.flatnonzero(~here).tolist():
            request = of.requests[number]
            here[number], flags[number] = not request.is_finished, request.flags
        return here & plan.is_live, flags

    def commit(
        self,
        plan: StepPlan,
        tokens: np.ndarray,
        counts: np.ndarray,
        stopped: np.ndarray,
        failed: Mapping[int, str] = MappingProxyType({}),
        redone: Collection[int] = (),
    ) -> list[Request]:
        """Record what the plan gave; returns the requests that it finishes.

        Requests that were finished or aborted since `schedule` are passed over: what is said of
        them counts for nothing. The numbers of sequences are those of `plan.sampled`.

        Args:
            plan: the advanced one, or if there is none the last one of `schedule`.
            tokens: int [N, W], the new tokens of each sequence: drafts that were accepted, and one
                more. Fewer if one of them ends the request.
            counts: int [N], how many these are.
            stopped: bool [N], whether the last one ends its request (end of sequence, a stop
                string), with "stop". Others finish with "length" when they have all the tokens
                they asked for, fill the context, or fill all the pages of a rank.
            failed: number -> why, of those that end without a token more. They finish with "error".
            redone: numbers of those with drafts that have fewer tokens than the device goes on
                from, or none. Drafts of these requests are not verified any more.

        Raises:
            RuntimeError: it is another plan.
            ValueError: the arrays are not of as many sequences, or there are other tokens than
                drafts of a sequence and one more. Nothing is changed then.
        """
        if plan is not self._unread_plan:
            self._expect_open(plan)
        _check_sampled(plan, tokens, counts, stopped, failed, redone)
        one_each = not (plan.has_drafts or failed or redone)
        if plan is not self._unread_plan:
            self.advance(plan)
        self._unread_plan = None
        self.statistics.steps += 1
        of, rows = plan.sampled, self.rows
        here = rows.hold(of.at, of.request_ids) & plan.is_live
        at = of.at[here]
        if one_each:  # as most are, and 0.1 us a row faster
            rows.put(at, tokens[here])
            self.statistics.generated_tokens += len(at)
            over = here & stopped
        else:
            before = rows.num_tokens.take(at) - 1
            rows.put(at, tokens[here], counts[here])
            self.statistics.generated_tokens += int(counts[here].sum())
            self._judge(plan, np.flatnonzero(here), before)
            full = rows.num_tokens.take(of.at) >= rows.limit.take(of.at)
            over = here & (stopped | full)
        for number in redone:
            if here[number]:
                self._redo(of.requests[number])
        ended: list[tuple[int, Request, FinishReason]] = []
        for number in sorted({*np.flatnonzero(over).tolist(), *failed}):
            reason: FinishReason = "stop" if stopped[number] else "length"
            if here[number]:
                request = of.requests[number]
                ended.append((number, request, "error" if number in failed else reason))
        for number in np.flatnonzero(~here & plan.is_live).tolist():
            request = of.requests[number]
            if request.is_finished:
                continue
            # It has its length, or ends by this token.
            request.known[-1:] = tokens[number, : counts[number]].tolist()
            self.statistics.generated_tokens += int(counts[number])
            reason = "stop" if stopped[number] else "length"
            ended.append((number, request, "error" if number in failed else reason))
        ended.sort(key=lambda one: one[0])
        for number, request, reason in ended:
            self.finish(request, reason, failed.get(number))
        return [request for _, request, _ in ended]

    def discard(self, plan: StepPlan) -> None:
        """Drop a plan that was not run, or failed; what it would have computed is planned again."""
        self._expect_open(plan)
        self._open_plan = None
        for rank, row, *_ in plan.new_pages:  # the device was not told of them
            self.rows.stale[rank, row] = self.rows.requests[rank, row] is not None

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
        elif self._ending.pop(request.request_id, None) is None:
            self._waiting.remove(request)
        if request.has_unread:
            request.known.pop()
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
        self._ending.clear()
        self._requests = {i: r for i, r in self._requests.items() if not r.is_finished}
        self._waiting = deque(sorted(self._requests.values(), key=turn_of))
        for request in self._waiting:
            if request.row is not None:
                self.rows.release(request)
            request.pages, request.computed, request.num_dropped = [], 0, 0
            if request.has_unread:
                request.known.pop()
        self._new_ranks(len(self._ranks))

    def forget_pages(self) -> None:
        """Keep no page any longer. RuntimeError while a request is unfinished."""
        if self.has_work:
            raise RuntimeError(
                f"{len(self._requests)} requests are unfinished, and use their pages"
            )
        self._new_ranks(len(self._ranks))

    def abort(self, request_id: int) -> Request | None:
        """End an unfinished request with "abort" and return it; None if the id has none."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def check(self) -> None:
        """Verify the books: RuntimeError naming the page or request that does not add up."""
        ending = list(self._ending.values())
        check_books(self._ranks, list(self._waiting), ending, self._requests)

    def _new_ranks(self, count: int) -> None:
        self.rows = Rows(count, self.limits)
        self._ranks = [
            Rank(index, self.rows, self._keeps_pages, self._deterministic, self._window)
            for index in range(count)
        ]

    @property
    def _num_evicted(self) -> int:
        return sum(rank.pages.num_evicted for rank in self._ranks)

    def _expect_open(self, plan: StepPlan) -> None:
        if plan is not self._open_plan:
            raise RuntimeError("this is not the open plan")

    def _decodes(self, held: dict[Request, int]) -> list[RankStep]:
        """See to the pages of the decodes; what they leave of each rank's budget.

        `held` gets the pages that those had which need more.
        """
        for request in sorted(self.rows.wanting(), key=turn_of):
            if request.rank is not None:
                held[request] = len(request.pages)
                self._ranks[request.rank].drop_unseen(request)
                self._grow(self._ranks[request.rank], request)
        counts = self.rows.decoding.sum(axis=1).tolist()
        return [RankStep(self.limits.max_tokens - count) for count in counts]

    def _prefill(self, steps: list[RankStep]) -> None:
        """Schedule prefills under way, then admissions."""
        for rank, step in zip(self._ranks, steps, strict=True):
            for request in list(rank.prefilling):
                if step.budget:
                    self.statistics.cached_tokens += rank.catch_up(request)
                    self._add(rank, step, request)
        self._admit(steps)

    def _prompts(self) -> list[RankStep] | None:
        """A step of prompts alone; None if there are none, or it is the decodes' turn."""
        if self._had_prompts and (
            self.rows.decoding.any() or any(rank.replaying for rank in self._ranks)
        ):
            return None
        steps = [RankStep(self.limits.max_tokens) for _ in self._ranks]
        self._prefill(steps)
        return steps if any(step.prefills for step in steps) else None

    def _replay(self, steps: list[RankStep]) -> None:
        """Schedule the next token of each request that decodes again what it had."""
        for rank, step in zip(self._ranks, steps, strict=True):
            for request in rank.replaying:
                step.add(request, 1)

    def _grow(self, rank: Rank, request: Request) -> None:
        """Get a decode its pages, preempting for them, itself if it is the last in order."""
        wanted = int(self.rows.most_tokens[request.rank, request.row])
        if not rank.grow(request, wanted):
            rank.take_back()
        while not rank.grow(request, wanted):
            last = rank.running[-1]
            if last is rank.running[0]:
                raise RuntimeError(f"request {request.request_id} outgrew the pages of its rank")
            self._preempt(rank, last)
            if last is request:
                return

    def _end(self, rank: Rank, request: Request) -> None:
        """Take off a request that has all its tokens but for the last one's value."""
        rank.release(request)
        self._ending[request.request_id] = request

    def _draft(
        self, steps: list[RankStep], held: dict[Request, int], propose: Propose | None
    ) -> tuple[np.ndarray, dict[Request, tuple[int, ...]]]:
        """How many drafts each decode verifies, [R, S], and those that are proposed.

        They are taken from the budgets; `held` gets the pages that those had which need more.
        """
        rows, proposed = self.rows, {}
        if propose is None:
            due = self.statistics.steps % np.left_shift(1, rows.misses) == 0
            wanted = np.where(due, self._max_drafts, 0)
        else:
            wanted = np.zeros_like(rows.num_tokens)
            for request in rows.requests[rows.decoding & rows.takes_drafts]:
                proposed[request] = tuple(propose(request))
                wanted[request.rank, request.row] = len(proposed[request])
        most = rows.most_tokens
        # One place is for the token that is sampled after the last draft.
        wanted = np.minimum(wanted, rows.limit - most - 1)
        wanted = np.where(rows.decoding & rows.takes_drafts, np.maximum(wanted, 0), 0)
        budgets = np.array([step.budget for step in steps])
        if self._waiting or any(rank.prefilling for rank in self._ranks):
            others = self.limits.max_sequences - rows.decoding.sum(axis=1)
            budgets = (budgets - others) // 2
        before = np.cumsum(wanted, axis=1) - wanted
        wanted = np.clip(budgets[:, None] - before, 0, wanted)
        for index, row in zip(*np.nonzero((wanted > 0) & (most + wanted > rows.room)), strict=True):
            request = rows.requests[index, row]
            held.setdefault(request, len(request.pages))
            room = self._ranks[index].stretch(request, int((most + wanted)[index, row]))
            wanted[index, row] = min(wanted[index, row], room - most[index, row])
        for step, taken in zip(steps, wanted.sum(axis=1).tolist(), strict=True):
            step.budget -= taken
        proposed = {
            request: drafts[: wanted[request.rank, request.row]]
            for request, drafts in proposed.items()
            if wanted[request.rank, request.row]
        }
        return wanted, proposed

    def _judge(self, plan: StepPlan, numbers: np.ndarray, before: np.ndarray) -> None:
        """Keep the pages that sequences with drafts filled, and learn whether these were of use.

        Args:
            plan: whose tokens are put in place.
            numbers: [N] of its sequences that decode.
            before: [N] int, how many tokens each of them had.
        """
        of, rows = plan.sampled, self.rows
        with_drafts = plan.num_drafts[numbers] > 0
        numbers, before = numbers[with_drafts], before[with_drafts]
        at = of.at[numbers]
        now, page_size = rows.num_tokens.take(at), self.limits.page_size
        for number in numbers[(now - 1) // page_size > (before - 1) // page_size].tolist():
            self._ranks[of.ranks[number]].keep(of.requests[number])
        misses = np.minimum(rows.misses.take(at) + 1, MOST_WAIT.bit_length() - 1)
        rows.misses.reshape(-1)[at] = np.where(now > before + 1, 0, misses)

    def _redo(self, request: Request) -> None:
        """Have a request decode from its last known token, and without drafts from now on."""
        rows, at = self.rows, (request.rank, request.row)
        request.takes_drafts = rows.takes_drafts[at] = False
        rows.stale[at] = True
        if self._open_plan is not None:
            self._open_plan.is_live &= self._open_plan.sampled.requests != request

    def _preempt(self, rank: Rank, request: Request) -> None:
        self.statistics.preemptions += 1
        self.statistics.discarded_tokens += request.num_computed
        request.num_preemptions += 1
        rank.release(request)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        """Queue a request, in its place in the order."""
        if not self._waiting or turn_of(self._waiting[-1]) < turn_of(request):
            self._waiting.append(request)  # as all do that come with one priority
        else:
            insort(self._waiting, request, key=turn_of)

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
            self._add(rank, steps[rank.index], request)

    def _add(self, rank: Rank, step: RankStep, request: Request) -> None:
        """Schedule a prefill, or what turned out to be a decode.

        Where decodes have steps of their own neither they nor replays are scheduled here.
        """
        alone = self._deterministic
        wanted = request.num_prompt_left if alone else request.num_uncomputed
        if request.rows is not None or rank.decode(request):
            step.budget -= not alone
        elif wanted and not rank.awaits(request):
            rank.drop_unseen(request)
            step.add(request, wanted)


def _check_sampled(
    plan: StepPlan,
    tokens: np.ndarray,
    counts: np.ndarray,
    stopped: np.ndarray,
    failed: Mapping[int, str],
    redone: Collection[int],
) -> None:
    """ValueError if new tokens, or the requests that end, are not those of this step."""
    count = len(plan.sampled)
    if tokens.ndim != 2 or {len(tokens), *counts.shape, *stopped.shape} != {count}:
        raise ValueError(
            f"got tokens {tokens.shape}, counts {counts.shape} and stopped {stopped.shape}; "
            f"expected ({count}, ...), ({count},) and ({count},), for each sequence that samples"
        )
    for number in {*failed, *redone}:
        if not 0 <= number < count:
            raise ValueError(f"got tokens of sequence {number}; expected one of {count}")
    fewest: np.ndarray | int = 1
    if failed or redone:
        fewest = np.ones(count, np.intp)
        fewest[[*failed, *redone]] = 0
    most = 1 + plan.num_drafts if plan.has_drafts else 1
    for number in np.flatnonzero((counts < fewest) | (counts > most)).tolist():
        raise ValueError(
            f"got {counts[number]} tokens of request {plan.sampled.request_ids[number]}; expected "
            f"{np.broadcast_to(fewest, count)[number]} to {plan.num_drafts[number] + 1}"
        )
    for number, drafts in plan.proposed.items():
        accepted = tuple(tokens[number, : max(counts[number] - 1, 0)].tolist())
        if drafts[: len(accepted)] != accepted:
            raise ValueError(
                f"got accepted drafts {list(accepted)} of request "
                f"{plan.sampled.request_ids[number]}; expected some of {list(drafts)}"
            )
    for number in np.flatnonzero(stopped & (counts == 0)).tolist():
        raise ValueError(f"sequence {number} stopped without a token; expected one")

"""Runs what the options of requests ask for around the sampler, and keeps their rows on the device.

A request whose logits depend on more than the step has a row of `RowTables` on its rank, from the
step that samples its first token there. A row is filled from the host, with the tokens that the
request has; after that each step adds the token of the step before, which may still be on the
device. So a row is never more than that token behind. It is free again when a step runs without its
request; if that was preempted, another row is filled when it is back, and all its tokens are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from tbo_jax.engine.request_options import RequestOptions
from tbo_jax.engine.sampler import (
    compile_change,
    compile_describe,
    compile_row_update,
    compile_tables,
)
from tbo_jax.engine.scheduling.plan import SampledSequence, StepPlan
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.parallel.processes import over_ranks
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.sampling.options import (
    ENDS,
    GENERATED,
    PROMPTED,
    OptionInputs,
    RowOptions,
    RowTables,
    RowUpdate,
)

ENTRIES = 1024  # of a kind, in one call of the program that fills rows
_NOTHING = RowOptions()

Options = Mapping[int, RequestOptions]  # of the requests that have any, by request id


@dataclass(slots=True)
class _Held:
    """A row of a request, and how many of the request's tokens it counts."""

    row: int
    num_tokens: int


@dataclass(slots=True)
class _Filling:
    """What one rank's rows are filled with."""

    cleared: dict[int, int]
    bias: list[tuple[int, int, int]]
    marks: list[tuple[int, int, int]]


class OptionRows:
    """The rows of all ranks, and the compiled programs that read and write them.

    The tables are allocated when the first request needs one.
    """

    def __init__(self, mesh: Mesh, max_sequences: int, vocab_size: int, max_logprobs: int):
        """Args:
        mesh: of the engine.
        max_sequences: most sequences of one step on one rank; as many rows.
        vocab_size: of the model.
        max_logprobs: how many of the most probable tokens are told at most.
        """
        self.mesh = mesh
        self.max_sequences = max_sequences
        self.vocab_size = vocab_size
        self.max_logprobs = min(max_logprobs, vocab_size)
        self._held: list[dict[int, _Held]] = [{} for _ in range(num_ranks(mesh))]
        self._tables: RowTables | None = None
        self._allocate: jax.stages.Compiled | None = None
        self._update: jax.stages.Compiled | None = None
        self._changes: dict[int, jax.stages.Compiled] = {}  # by rows of the logits
        self._describes: dict[int, jax.stages.Compiled] = {}

    @property
    def table_bytes(self) -> int:
        """What the tables take of each device."""
        shapes = jax.tree.leaves(RowTables.shapes(self.max_sequences, self.vocab_size))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)

    def compile(self, rows: int) -> list[jax.stages.Compiled]:
        """Compile what a step with so many rows of logits may run; returns these programs.

        The one that allocates the tables is left out.
        """
        sizes = self.max_sequences, self.vocab_size
        if self._allocate is None:
            self._allocate = compile_tables(self.mesh, *sizes)
        if self._update is None:
            self._update = compile_row_update(self.mesh, *sizes, ENTRIES)
        if rows not in self._changes:
            self._changes[rows] = compile_change(
                self.mesh, rows, self.vocab_size, self.max_sequences, self.max_sequences
            )
            self._describes[rows] = compile_describe(
                self.mesh, rows, self.vocab_size, self.max_logprobs
            )
        return [self._update, self._changes[rows], self._describes[rows]]

    def forget(self) -> None:
        """Drop all rows: a step failed, and what was donated to it may be gone."""
        for leaf in jax.tree.leaves(self._tables):
            if not leaf.is_deleted():
                leaf.delete()
        self._tables = None
        for held in self._held:
            held.clear()

    def change(
        self,
        plan: StepPlan,
        options: Options,
        logits: jax.Array,
        before: jax.Array | None,
        width: int = 1,
    ) -> jax.Array:
        """The logits [R, L, V] as the requests of a step want them.

        Args:
            plan: the step.
            options: of its requests.
            logits: of the step; returned as they are if no request changes any.
            before: tokens [R, max_sequences] of the step whose unread ones `plan` has.
            width: rows of the logits that a sequence has.
        """
        sampled = plan.sampled_of(options)
        if not any(options[one.request.request_id].changes_logits for one in sampled):
            return logits
        count, rows = len(self._held), logits.shape[1]
        self.compile(rows)
        tables = self._filled(sampled, options)
        asked: list[dict[int, RowOptions]] = [{} for _ in range(count)]
        for one in sampled:
            of_rows = self._rows(one, options[one.request.request_id])
            asked[one.rank].update(enumerate(of_rows, one.place * width))
        packed = np.stack([OptionInputs.pack(of_rank, rows) for of_rank in asked])
        for one in sampled:
            held = self._held[one.rank].get(one.request.request_id)
            if held is not None:
                held.num_tokens = one.request.num_tokens
        nothing = np.zeros((count, self.max_sequences), np.int32)
        given = over_ranks((packed, nothing if before is None else before), self.mesh)
        changed, marks = self._changes[rows](logits, *given, tables.bias, tables.marks)
        self._tables = RowTables(tables.bias, marks)
        return changed

    def describe(
        self, plan: StepPlan, options: Options, logits: jax.Array, tokens: jax.Array
    ) -> jax.Array | None:
        """Log-probabilities of a step's tokens [R, L, ...], if any request wants them.

        Args:
            plan: the step.
            options: of its requests.
            logits: of the step, before any option changed them.
            tokens: [R, L], as they were sampled.
        """
        wanted = plan.sampled_of(options)
        if all(options[one.request.request_id].logprobs is None for one in wanted):
            return None
        rows = logits.shape[1]
        self.compile(rows)
        described: jax.Array = self._describes[rows](logits, tokens)
        return described

    def _filled(self, sampled: Sequence[SampledSequence], options: Options) -> RowTables:
        """The tables, with a row for each request of the step that needs one."""
        assert self._allocate is not None and self._update is not None
        fillings = [
            self._assign([one.request for one in sampled if one.rank == rank], held, options)
            for rank, held in enumerate(self._held)
        ]
        if self._tables is None:
            self._tables = self._allocate()
        tables = self._tables
        assert tables is not None
        most = max(max(len(f.bias), len(f.marks), len(f.cleared)) for f in fillings)
        for start in range(0, most, ENTRIES):
            updates = [self._part(filling, start) for filling in fillings]
            update = jax.tree.map(lambda *leaves: np.stack(leaves), *updates)
            tables = self._update(tables, over_ranks(update, self.mesh))
        return tables

    def _assign(
        self, sampled: Sequence[Request], held: dict[int, _Held], options: Options
    ) -> _Filling:
        """Give the requests of a rank their rows, those of others being free again."""
        wanting = {
            request.request_id: request
            for request in sampled
            if options[request.request_id].needs_row
        }
        for request_id in [i for i in held if i not in wanting]:
            del held[request_id]
        taken = {one.row for one in held.values()}
        free = iter([row for row in range(self.max_sequences) if row not in taken])
        filling = _Filling({}, [], [])
        for request_id, request in wanting.items():
            if request_id in held:
                continue
            of, row = options[request_id], next(free)
            held[request_id] = _Held(row, request.num_tokens)
            filling.cleared[row] = 2 if of.only else 1
            filling.bias += [
                (row, token, int(np.float32(value).view(np.int32))) for token, value in of.bias
            ]
            filling.marks += [(row, token, added) for token, added in _marks(request, of).items()]
        return filling

    def _part(self, filling: _Filling, start: int) -> RowUpdate:
        """The entries from `start` on that one call takes; rows are cleared in the first."""
        update = RowUpdate.empty(self.max_sequences, ENTRIES)
        if start == 0:
            for row, how in filling.cleared.items():
                update.cleared[row] = how
        for array, entries in ((update.bias, filling.bias), (update.marks, filling.marks)):
            part = entries[start : start + ENTRIES]
            array[: len(part)] = np.array(part, np.int32).reshape(-1, 3)
        return update

    def _rows(self, sampled: SampledSequence, of: RequestOptions) -> Iterator[RowOptions]:
        """What the rows of a sequence's logits are told: that of its token, and of each draft."""
        request, params = sampled.request, sampled.request.params
        mine = self._held[sampled.rank].get(request.request_id)
        for index in range(len(sampled.drafts) + 1):
            drafts = sampled.drafts[:index]
            yield RowOptions(
                row=_NOTHING.row if mine is None else mine.row,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                may_not_end=request.num_generated + index < params.min_tokens,
                last=request.token_ids[-1] if not drafts else drafts[-1],
                counts=of.counts and mine is not None and mine.num_tokens < request.num_tokens,
                words=_words(request, drafts, of.words),
            )


def _marks(request: Request, options: RequestOptions) -> dict[int, int]:
    """What the row of a request has in `RowTables.marks`, by token."""
    marks = dict.fromkeys(options.ends, ENDS)
    if options.counts:
        for token in set(request.prompt_token_ids):
            marks[token] = marks.get(token, 0) + PROMPTED
        for token in request.generated_token_ids:
            marks[token] = marks.get(token, 0) + GENERATED
    return marks


def _words(
    request: Request, drafts: Sequence[int], words: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], ...]:
    """The last tokens of `words` that may not follow, each with the one it may not follow.

    That is -1 where all before it are known to be there. The last token may be an unread one.
    """
    if not words:
        return ()
    longest = max(map(len, words)) - 1
    known = request.token_ids[-min(longest, request.num_generated) :]
    past = [*(known if request.num_generated else ()), *drafts]
    found = []
    for *start, end in words:
        here = past[-len(start) :]
        if len(here) == len(start) and here[:-1] == start[:-1]:
            if here[-1] < 0:
                found.append((start[-1], end))
            elif here[-1] == start[-1]:
                found.append((-1, end))
    return tuple(found)

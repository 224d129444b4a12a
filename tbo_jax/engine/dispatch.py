"""From a plan to work on the device: picks the bucket, packs the batch, starts step and sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.engine.auto.decide import Decision, decide
from tbo_jax.engine.auto.trial import Timer
from tbo_jax.engine.option_rows import OptionRows, Options
from tbo_jax.engine.prompt_lookup import TO_FIND
from tbo_jax.engine.row_state import (
    CONTEXT,
    LAST_TOKEN,
    SAMPLING,
    TOKEN,
    RowChanges,
    RowState,
    SampledStep,
    SampledSteps,
    StepInputs,
    describing_prompts,
    needed_again,
    sampled_rows,
    stacked,
    with_sampling,
    zeros,
)
from tbo_jax.engine.sampler import compile_change_rows, compile_sample_again
from tbo_jax.engine.scheduling.plan import SampledRows, StepPlan
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.scheduling.rows import Rows
from tbo_jax.engine.structured.masks import Structures, TokenMasks
from tbo_jax.parallel.processes import over_ranks
from tbo_jax.parallel.sharding import RANKS
from tbo_jax.sampling.draw import SamplingInputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, sizes_between

MOST_NUMBERS = 2**17  # of rows that change, sent at a time


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of a prompt in a step, of which it is told how probable their successors are."""

    request: Request
    rank: int
    slot: int  # of the first one
    tokens: range  # their numbers in the prompt

    @property
    def slots(self) -> slice:
        """Where they are in the step."""
        return slice(self.slot, self.slot + len(self.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """Those of a step, and what it tells of them."""

    chunks: list[PromptChunk]
    described: jax.Array  # [R, T, ...] int32, as `sampling.options.describe` gives it

    def read(self) -> None:
        """Wait for it, and give it to the requests that are not finished."""
        described = np.asarray(self.described)
        for chunk in self.chunks:
            told = chunk.request.prompt_logprobs
            if told is not None and not chunk.request.is_finished:
                told.put(chunk.tokens.start, described[chunk.rank, chunk.slots])


def prompt_chunks(plan: StepPlan) -> list[PromptChunk]:
    """What the requests of a step want to be told of their prompts."""
    chunks = []
    for rank, prefills in enumerate(plan.prefills):
        slot = int(plan.num_decodes[rank] + plan.num_drafts[plan.sampled.ranks == rank].sum())
        for sequence in prefills:
            request, start = sequence.request, sequence.request.num_computed
            if request.prompt_logprobs is not None:
                tokens = request.prompt_logprobs.wanted(start, start + sequence.num_tokens)
                if tokens:
                    chunks.append(PromptChunk(request, rank, slot + tokens.start - start, tokens))
            slot += sequence.num_tokens
    return chunks


@dataclass(frozen=True, slots=True, eq=False)
class StartedStep:
    """A step that the device runs, and from whose logits tokens may have to be sampled again."""

    plan: StepPlan
    bucket: Bucket
    state: RowState  # before it
    inputs: StepInputs
    outputs: SampledStep
    before: DispatchedStep | None  # the step whose tokens the unread ones of `plan` are
    prompts: PromptChunks | None = None  # what it tells of prompts, if a request wants that


@dataclass(frozen=True, slots=True, eq=False)
class DispatchedStep:
    """A step that was handed to the device, where it may still be running."""

    plan: StepPlan
    bucket: Bucket
    tokens: jax.Array  # [R, S] int32, the last token of each sequence
    readable: jax.Array  # [R, L] int32, for the host: rows of the logits; with `NOT_FINITE`
    counts: jax.Array | None  # [R, B] int32, of a bucket with drafts: how many of these stand
    ahead: bool  # the tokens of the step before were not read yet
    described: jax.Array | None = None  # [R, L, ...] int32, where log-probabilities are wanted
    prompts: PromptChunks | None = None  # where log-probabilities of prompts are wanted

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the tokens that the sequences of `plan.sampled` sample.

        Returns:
            Tokens [N, 1 + drafts of the bucket] int32, the one after the last token and those after
            each draft, `NOT_FINITE` where logits were not; and how many of them stand, [N] int32.
        """
        of, tokens = self.plan.sampled, self._of_sampled(np.asarray(self.readable))
        if self.counts is None:
            return tokens, np.ones(len(of), np.int32)
        return tokens, np.asarray(self.counts)[of.ranks, of.places]

    def read_described(self) -> np.ndarray | None:
        """Wait for the log-probabilities of each token that `read` gives; None without any.

        The last axis is one of `sampling.options.describe`.
        """
        return None if self.described is None else self._of_sampled(np.asarray(self.described))

    def _of_sampled(self, values: np.ndarray) -> np.ndarray:
        """Rows of the logits [R, L, ...] -> of the sequences [N, 1 + drafts, ...]."""
        of, shape = self.plan.sampled, (self.bucket.sequences, 1 + self.bucket.drafts)
        found: np.ndarray = values.reshape(len(values), *shape, *values.shape[2:])[
            of.ranks, of.places
        ]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _DecodesOnly:
    """What a step without prompts and drafts was told, which the next one is mostly told again."""

    bucket: Bucket
    sampled: SampledRows
    tokens: np.ndarray
    layout: np.ndarray

    def is_of(self, plan: StepPlan, bucket: Bucket) -> bool:
        """Whether the same rows decode, and nothing else is computed."""
        return (
            bucket == self.bucket
            and not (plan.has_drafts or any(plan.prefills))
            and np.array_equal(plan.sampled.ranks, self.sampled.ranks)
            and np.array_equal(plan.sampled.rows, self.sampled.rows)
        )


def buckets_of(
    max_tokens: int, max_sequences: int, drafts: int, one_of_each: bool = False
) -> tuple[list[Bucket], list[Bucket], list[Bucket]]:
    """The shapes of steps that decode, that verify drafts, and of all others; largest ones last.

    With `one_of_each` only the largest.
    """
    decode = [Bucket(n, n, True) for n in sizes_between(1, max_sequences, 2)]
    verify = [
        Bucket(min(n * (drafts + 1), max_tokens), n, True, drafts)
        for n in sizes_between(1, max_sequences, 4)
        if drafts
    ]
    prefill = [Bucket(n, max_sequences, drafts=drafts) for n in sizes_between(16, max_tokens, 4)]
    if one_of_each:
        return decode[-1:], verify[-1:], prefill[-1:]
    return decode, verify, prefill


class Dispatcher:
    """Holds the attention buffers and hands them from step to step.

    They are allocated when all is compiled: XLA:GPU tries kernels out while it compiles, and needs
    memory for that.

    Every step has the shape of one of a few buckets, all compiled by `compile_all`. A step with one
    token a sequence takes the smallest decode bucket that holds its rows, one with drafts too the
    smallest verify bucket, any other the smallest prefill bucket that holds its tokens. The bucket
    is chosen from the counts of all ranks, so that all of them run the same program. With a
    deterministic runner there is one decode bucket, which steps with decodes take, and one prefill
    bucket, which all others take.

    After `compile_first` only the largest bucket of each kind is there, and after each
    `compile_further` one more. A step takes the smallest that is there and holds it, so that none
    waits for a compiler.

    A step that tells log-probabilities of prompts has the shape of a prefill bucket, and runs
    another program of it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_sequences: int,
        drafts: int = 0,
        max_logprobs: int | None = None,
        max_prompt_logprobs: int | None = None,
        finds_drafts: bool = False,
    ) -> None:
        """Args:
        runner: compiles and runs the step.
        max_sequences: most sequences of one step on one rank.
        drafts: most draft tokens of a sequence.
        max_logprobs: of options of requests (`OptionRows`); None: no request has any.
        max_prompt_logprobs: how many of the most probable tokens are told with those of a
            prompt; None: no request wants log-probabilities of its prompt.
        finds_drafts: whether the device finds drafts; for others they are in the plans.
        """
        self.runner = with_sampling(runner, max_sequences, finds_drafts)
        self.max_sequences = max_sequences
        self._program = SampledSteps.of(runner, max_sequences, finds_drafts)
        self._decode_buckets, self._verify_buckets, self._prefill_buckets = buckets_of(
            runner.cache.max_tokens, max_sequences, drafts, runner.deterministic
        )
        self._there: set[Bucket] | None = None  # what steps may take; None: all
        self._describing = None
        if max_prompt_logprobs is not None:
            self._describing = describing_prompts(self.runner, self._program, max_prompt_logprobs)
        self._allocated: AttentionBuffers | None = None
        self._state: RowState | None = None
        self._change_rows: tuple[jax.stages.Compiled, RowState] | None = None
        self._samplers: dict[Bucket, jax.stages.Compiled] = {}  # of steps with options
        self._sent: dict[tuple[Bucket, str], tuple[np.ndarray, Any]] = {}
        self._decodes_only: _DecodesOnly | None = None  # the last step, if it was such a one
        self._options, self._masks = None, None
        if max_logprobs is not None:
            vocabulary = runner.config.vocab_size
            self._masks = TokenMasks(runner.mesh, vocabulary)
            self._options = OptionRows(runner.mesh, max_sequences, vocabulary, max_logprobs)

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes of all steps."""
        return [*self._decode_buckets, *self._verify_buckets, *self._prefill_buckets]

    def compile_all(
        self,
        progress: Callable[[int, int], None] | None = None,
        timer: Timer | None = None,
    ) -> dict[Bucket, Decision]:
        """Compile every program that `dispatch` may run; see `Engine.warm_up`.

        Returns:
            What was decided of each bucket with `USE_TBO=auto`, where what the cache held is lost.
        """
        decisions: dict[Bucket, Decision] = {}
        if self.runner.overlap.mode == "auto":
            self._free()
            decisions, self._allocated = decide(
                self.runner, self.buckets, timer=timer, progress=progress
            )
        else:
            self.runner.compile_all(self.buckets, progress)
        self._changer()
        for bucket in self.buckets:
            self._compile_beside(bucket)
        self._there = None
        self._buffers()
        return decisions

    def compile_first(self, progress: Callable[[int, int], None] | None = None) -> list[Bucket]:
        """Compile what can run every step, though not fast: the largest bucket of each kind.

        Returns:
            The others, for `compile_further`: smallest first, which single requests take.
        """
        kinds = self._decode_buckets, self._verify_buckets, self._prefill_buckets
        first = [kind[-1] for kind in kinds if kind]
        self.runner.compile_all(first, progress)
        self._changer()
        for bucket in first:
            self._compile_beside(bucket)
        self._there = set(first)
        self._buffers()
        further = [bucket for kind in kinds for bucket in kind[:-1]]
        return sorted(further, key=lambda bucket: bucket.tokens)

    def compile_further(self, bucket: Bucket) -> None:
        """Compile one more, which steps take from then on. Another thread may run steps."""
        self.runner.compile(bucket)
        self._compile_beside(bucket)
        if self._there is not None:
            self._there.add(bucket)

    @property
    def num_there(self) -> int:
        """How many of `buckets` steps may take."""
        return len(self.buckets) if self._there is None else len(self._there)

    def _compile_beside(self, bucket: Bucket) -> None:
        """What runs beside the step of a bucket: programs of options, and of prompts told."""
        if self._describing is not None and bucket in self._prefill_buckets:
            self._describing.compile(bucket, self.runner.strategy(bucket))
        if self._options is not None and self._masks is not None:
            self._options.compile(sampled_rows(bucket))
            self._masks.compile(sampled_rows(bucket))
            self._sampler(bucket)

    def start(
        self, plan: StepPlan, rows: Rows, before: DispatchedStep | None = None
    ) -> StartedStep:
        """Start a step; returns without waiting for it. Before the next one it is to be sampled.

        Args:
            plan: with one sequence or more.
            rows: of its requests. What is stale of them is sent.
            before: the step whose tokens the unread ones of `plan` are.
        """
        chunks = prompt_chunks(plan)
        bucket = self.bucket_of(plan, bool(chunks))
        state = self._up_to_date(rows)
        inputs = over_ranks(self._inputs(plan, bucket, chunks), self.runner.mesh)
        given, prompts = (bucket, self._buffers(), state, inputs), None
        if chunks:
            assert self._describing is not None
            strategy = self.runner.strategy(bucket)
            outputs, self._allocated = self._describing.run(*given, strategy=strategy)
            prompts = PromptChunks(chunks, outputs.described)
        else:
            outputs, self._allocated = self.runner.run(*given)
        return StartedStep(plan, bucket, state, inputs, outputs, before, prompts)

    def sample(
        self,
        started: StartedStep,
        options: Options = MappingProxyType({}),
        structures: Structures = MappingProxyType({}),
    ) -> DispatchedStep:
        """Have the tokens of a started step; returns without waiting for them.

        Args:
            started: by `start`.
            options: of its requests that have any; `max_logprobs` must have been given for them.
            structures: likewise, each after all tokens of its request, so that these were read.
        """
        plan, bucket, before = started.plan, started.bucket, started.before
        outputs, prompts = started.outputs, started.prompts
        logits, described = outputs.logits, None
        if options:
            assert self._options is not None
            fed = None if before is None else before.tokens
            logits = self._options.change(plan, options, logits, fed, 1 + bucket.drafts)
        if structures:
            assert self._masks is not None
            logits = self._masks.change(plan, structures, logits, 1 + bucket.drafts)
        if logits is not outputs.logits:
            given = [started.state, needed_again(started.inputs), logits]
            given += [outputs.drafts] if bucket.drafts else []
            outputs = self._sampler(bucket)(*given)
        if options:
            assert self._options is not None
            logits = started.outputs.logits  # those of the model
            described = self._options.describe(plan, options, logits, outputs.readable)
        self._state = outputs.state
        of_prompts = None if prompts is None else prompts.described
        for array in (outputs.readable, outputs.counts, described, of_prompts):
            if array is not None:
                array.copy_to_host_async()  # while the next step runs
        ahead = before is not None
        return DispatchedStep(
            plan,
            bucket,
            outputs.tokens,
            outputs.readable,
            outputs.counts,
            ahead,
            described,
            prompts,
        )

    def bucket_of(self, plan: StepPlan, prefill: bool = False) -> Bucket:
        """The shape of a step: of all ranks, those without tokens included.

        With `prefill` it is that of a prefill, also where each sequence has but one token.
        """
        rows, tokens = plan.num_sequences.max(), plan.num_tokens.max()
        if self.runner.deterministic:
            decodes = plan.with_decodes
        else:
            prefills = [one for rank in plan.prefills for one in rank]
            decodes = not prefill and all(one.num_tokens == 1 for one in prefills)
        if decodes:
            shaped = self._verify_buckets if plan.has_drafts else self._decode_buckets
        else:
            shaped, rows = self._prefill_buckets, 0  # each has all sequences
        there = self._there
        return next(
            bucket
            for bucket in shaped
            if bucket.sequences >= rows
            and bucket.tokens >= tokens
            and (there is None or bucket in there)
        )

    def recover(self) -> None:
        """Be ready for new steps after one that was interrupted or failed; the cache is lost.

        The buffers were donated to it: they may be gone, or hold its error.
        """
        self._free()
        self._state = None
        if self._options is not None:
            self._options.forget()

    def _buffers(self) -> AttentionBuffers:
        if self._allocated is None:
            self._allocated = self.runner.allocate()
        return self._allocated

    def _free(self) -> None:
        for leaf in jax.tree.leaves(self._allocated):
            if not leaf.is_deleted():
                leaf.delete()
        self._allocated = None

    def _up_to_date(self, rows: Rows) -> RowState:
        """The state of the rows, with what is stale of them sent."""
        if self._state is None:
            self._state = self._changer()[1]
        if rows.stale.any():
            for changes in self._changes(rows):
                placed = over_ranks(changes, self.runner.mesh)
                self._state = self._changer()[0](self._state, placed)
            rows.stale[:] = False
        return self._state

    def _changes(self, rows: Rows) -> Iterator[RowChanges]:
        """What makes stale rows what they should be, so many at a time."""
        ranks, at = np.nonzero(rows.stale)
        requests = rows.requests[ranks, at].tolist()
        numbers = np.zeros((len(requests), SAMPLING.stop), np.int32)
        # The device is ahead where the last token is not read, and knows all but the pages.
        numbers[:, CONTEXT] = [-1 if r.has_unread else r.num_computed for r in requests]
        numbers[:, TOKEN] = [request.token_ids[-1] for request in requests]
        numbers[:, SAMPLING] = SamplingInputs.from_rows(
            [request.params for request in requests],
            [request.seed for request in requests],
            [request.num_generated for request in requests],
            len(requests),
        ).packed()
        count = self._rows_at_a_time
        place = np.arange(len(ranks)) - np.searchsorted(ranks, ranks)  # on its rank
        for first in range(0, int(place.max()) + 1, count):
            shapes = RowChanges.shapes(count, self._program.state_shapes)
            changes = zeros(stacked(self._program.ranks, shapes))
            changes.rows[:] = self.max_sequences
            for number in np.flatnonzero((place >= first) & (place < first + count)).tolist():
                to, pages = (ranks[number], place[number] - first), requests[number].pages
                changes.rows[to] = at[number]
                changes.numbers[to] = numbers[number]
                changes.pages[to][: len(pages)] = pages
                if changes.history is not None and numbers[number, CONTEXT] >= 0:
                    known = requests[number].token_ids
                    changes.history[to][: len(known)] = known
            yield changes

    def _inputs(
        self, plan: StepPlan, bucket: Bucket, chunks: Sequence[PromptChunk] = ()
    ) -> StepInputs:
        """What the step is told. What it was told before, the devices have already."""
        of = plan.sampled
        last = self._decodes_only
        if last is not None and last.is_of(plan, bucket):
            tokens, layout = last.tokens, last.layout
        else:
            tokens, layout = self._layout(plan, bucket)
            self._decodes_only = None
            if not (plan.has_drafts or any(plan.prefills)):
                self._decodes_only = _DecodesOnly(bucket, of, tokens, layout)
        shape = StepInputs.shapes(bucket, self.runner.cache).new_pages.shape
        new_pages = np.zeros((self._program.ranks, *shape), np.int32)
        if plan.new_pages:
            place_of = np.zeros((self._program.ranks, self.max_sequences), np.intp)
            place_of[of.ranks, of.rows] = of.places
            filled: Counter[tuple[int, int]] = Counter()
            for rank, row, at, page in plan.new_pages:
                new_pages[rank, place_of[rank, row], filled[rank, row]] = at, page
                filled[rank, row] += 1
        named = {"tokens": tokens, "layout": layout, "new_pages": new_pages}
        if chunks:
            named["targets"] = np.full_like(tokens, -1)
            for chunk in chunks:
                after = slice(chunk.tokens.start + 1, chunk.tokens.stop + 1)
                targets = chunk.request.prompt_token_ids[after]
                named["targets"][chunk.rank, chunk.slots] = targets
        return StepInputs(**{name: self._send(bucket, name, a) for name, a in named.items()})

    def _layout(self, plan: StepPlan, bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
        """`StepInputs.tokens` and `StepInputs.layout` of all ranks."""
        shapes = stacked(self._program.ranks, StepInputs.shapes(bucket, self.runner.cache))
        tokens = np.full(shapes.tokens.shape, LAST_TOKEN, np.int32)
        layout = np.zeros(shapes.layout.shape, np.int32)
        of = plan.sampled
        layout[:, 1] = self.max_sequences
        layout[of.ranks, 0, of.places] = 1
        layout[of.ranks, 1, of.places] = of.rows
        layout[of.ranks, 2, of.places] = 1
        starts = plan.num_decodes.copy()  # of the prefills
        if plan.has_drafts:
            layout[of.ranks, 0, of.places] += plan.num_drafts
            layout[of.ranks, 3, of.places] = plan.num_drafts
            ends = np.cumsum(layout[:, 0], axis=1)
            numbers = np.flatnonzero(plan.num_drafts)
            first = (ends - layout[:, 0])[of.ranks[numbers], of.places[numbers]] + 1
            for place in range(int(plan.num_drafts.max())):
                more = plan.num_drafts[numbers] > place
                tokens[of.ranks[numbers[more]], first[more] + place] = TO_FIND
            for number, start in zip(numbers.tolist(), first.tolist(), strict=True):
                if number in plan.proposed:
                    drafts = plan.proposed[number]
                    tokens[of.ranks[number], start : start + len(drafts)] = drafts
            decodes = np.maximum(plan.num_decodes - 1, 0)
            starts = np.where(plan.num_decodes > 0, ends[np.arange(len(ends)), decodes], 0)
        for rank, prefills in enumerate(plan.prefills):
            start = starts[rank]
            for place, sequence in enumerate(prefills, plan.num_decodes[rank]):
                row, count = sequence.request.row, sequence.num_tokens
                layout[rank, :2, place] = count, row
                tokens[rank, start : start + count] = sequence.token_ids
                start += count
        return tokens, layout

    def _send(self, bucket: Bucket, name: str, values: np.ndarray) -> Any:
        """The values, on the devices already if they were told twice in a row."""
        if (bucket, name) in self._sent:
            last, there = self._sent[bucket, name]
            if last is values or np.array_equal(last, values):
                if there is None:
                    placed = NamedSharding(self.runner.mesh, PartitionSpec(RANKS))
                    there = jax.make_array_from_callback(
                        values.shape, placed, lambda index: values[index]
                    )
                    self._sent[bucket, name] = last, there
                return there
        self._sent[bucket, name] = values, None
        return values

    def _changer(self) -> tuple[jax.stages.Compiled, RowState]:
        if self._change_rows is None:
            count = self._rows_at_a_time
            self._change_rows = compile_change_rows(self.runner.mesh, self._program, count)
        return self._change_rows

    @property
    def _rows_at_a_time(self) -> int:
        columns = sum(leaf.shape[1] for leaf in jax.tree.leaves(self._program.state_shapes))
        return min(self.max_sequences, 16, max(1, MOST_NUMBERS // columns))

    def _sampler(self, bucket: Bucket) -> jax.stages.Compiled:
        """For steps whose logits are changed; it does not depend on their token slots."""
        bucket = Bucket(bucket.sequences, bucket.sequences, True, bucket.drafts)
        if bucket not in self._samplers:
            vocabulary = self.runner.config.vocab_size
            self._samplers[bucket] = compile_sample_again(
                self.runner.mesh, self._program, bucket, vocabulary
            )
        return self._samplers[bucket]

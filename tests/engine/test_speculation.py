"""Drafts verified in a step: the tokens, text and ends of decoding one by one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax import LLM, OverlapConfig, SamplingParams
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.scheduling.plan import ScheduledSequence, StepPlan
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.scheduling.rows import Rows
from tbo_jax.step.runner import ModelRunner
from tests.engine.loads import END_OF_SEQUENCE, VOCABULARY, Load, Result, random_load, run
from tests.engine.not_finite import BAD, EMBEDDING, check_until_bad, load_with_bad, poisoned
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)
DRAFTS = 3


class Oracle:
    """Proposes what is to come, known from before, up to a first wrong token."""

    def __init__(self, right: int = DRAFTS):
        self.right = right
        self.known: list[list[int]] = []  # prompts with what they gave

    def learn(self, load: Load, events) -> None:
        given = [[e.token_id for e in of] for of in events]
        self.known = [p + g for p, g in zip(load.prompts, given, strict=True)]

    def __call__(self, token_ids, most):
        for known in self.known:
            if known[: len(token_ids)] == list(token_ids):
                coming = known[len(token_ids) :][:most]
                wrong = [(token + 1) % VOCABULARY for token in coming]
                return coming[: self.right] + wrong[self.right :]
        return []


@pytest.fixture(
    scope="module",
    params=[  # devices, micro-batches, layers scanned
        pytest.param((1, 1, False), marks=pytest.mark.slow),
        (4, 2, False),
        # The logits of other numbers of micro-batches are those of tests/models/test_verify_steps.
        pytest.param((4, 3, True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def engine(tmp_path_factory, request) -> Engine:
    """With few rows and pages: steps of one to eight tokens a rank."""
    devices, micro_batches, scanned = request.param
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_SEQUENCE}))
    return LLM(
        folder,
        devices=devices,
        overlap=OverlapConfig("on" if micro_batches > 1 else "off", max(2, micro_batches)),
        scanned=scanned,
        max_sequences=2,
        max_batched_tokens=8,
        page_size=4,
        num_pages=16,
        compilation_cache=False,
        speculate=DRAFTS,
    ).engine


def run_plainly(engine: Engine, load: Load) -> Result:
    """Without drafts: every decode computes one token."""
    before = engine.statistics.drafted_tokens
    result = run_with(lambda token_ids, most: [], engine, load)
    assert engine.statistics.drafted_tokens == before
    return result


def run_with(propose, engine: Engine, load: Load) -> Result:
    """With drafts that the host proposes."""
    engine._propose, engine.look_ahead = propose, False
    try:
        return run(engine, load)
    finally:
        engine._propose, engine.look_ahead = None, True


def test_greedy_tokens_of_transformers(engine, compilations):
    assert engine.look_ahead
    wanted = SamplingParams(max_new_tokens=16, ignore_eos=True)
    load = Load(GOLDEN.prompts, [wanted] * 3, [0] * 3)
    found = run(engine, load)
    assert [[event.token_id for event in of] for of in found.events] == GOLDEN.greedy
    assert engine.statistics.drafted_tokens > 0 and engine.statistics.steps_ahead > 0
    assert compilations() == 0


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "waiting"])
def test_drafts_of_the_device_give_the_same_tokens_and_text(engine, ahead, compilations):
    """Greedy and drawn, ended by length, stop strings, end of sequence and aborts."""
    reasons = []
    before = engine.statistics.drafted_tokens, engine.statistics.accepted_tokens
    for seed in range(15):
        load = random_load(np.random.default_rng(seed), content=seed % 2 == 1)
        expected = run_plainly(engine, load)
        engine.look_ahead = ahead
        found = run(engine, load)
        engine.check()
        for index, (ours, theirs) in enumerate(zip(found.events, expected.events, strict=True)):
            if index in load.abort_after:
                # Requests come and go at other steps, so that it may be aborted at another one.
                shorter = min(len(ours), len(theirs)) - 1
                ours, theirs = ours[:shorter], theirs[:shorter]
            assert ours == theirs
            reasons += [event.finish_reason for event in found.events[index][-1:]]
    engine.look_ahead = True
    assert {"stop", "length"} <= set(reasons)
    assert engine.statistics.drafted_tokens - before[0] > 200
    assert engine.statistics.accepted_tokens - before[1] > 10
    assert compilations() == 0


@pytest.mark.parametrize("right", range(DRAFTS + 1))
def test_right_and_wrong_drafts_give_the_same_tokens_and_text(engine, right, compilations):
    """Greedy and drawn, ended by length, stop strings, end of sequence and aborts."""
    oracle = Oracle(right)
    reasons = []
    before = engine.statistics.drafted_tokens, engine.statistics.accepted_tokens
    for seed in range(right * 5, right * 5 + 5):
        load = random_load(np.random.default_rng(seed), content=seed % 2 == 1)
        expected = run_plainly(engine, load)
        oracle.learn(load, expected.events)
        found = run_with(oracle, engine, load)
        if not load.abort_after:
            assert found == expected
        for index, (ours, theirs) in enumerate(zip(found.events, expected.events, strict=True)):
            if index in load.abort_after:
                # Requests come and go at other steps, so that it may be aborted earlier or later.
                theirs = theirs[: len(ours)]
            assert ours[: len(theirs)] == theirs
            reasons += [event.finish_reason for event in ours[-1:]]
    assert {"stop", "length"} <= set(reasons)
    assert compilations() == 0
    drafted = engine.statistics.drafted_tokens - before[0]
    accepted = engine.statistics.accepted_tokens - before[1]
    assert drafted > 50
    assert accepted > 0.8 * drafted if right == DRAFTS else accepted < drafted
    assert (accepted == 0) == (right == 0)


@pytest.mark.parametrize("new", [1, 2, 4, 5, 7])
def test_the_last_token_lies_within_the_drafts(engine, new, monkeypatch):
    """Every length, and every token as an end or a stop string, at any place of right drafts."""

    def load(count=9, **options):
        return Load([GOLDEN.prompts[1]], [SamplingParams(max_new_tokens=count, **options)], [0])

    whole = load(ignore_eos=True)
    (events,) = run_plainly(engine, whole).events
    oracle = Oracle()
    oracle.learn(whole, [events])
    expected = run_plainly(engine, load(new, ignore_eos=True))
    engine.clear_prefix_cache()
    steps = engine.statistics.steps
    assert run_with(oracle, engine, load(new, ignore_eos=True)) == expected
    # The prompt takes two steps and gives a token, then there are four a step.
    prompt = -(-len(GOLDEN.prompts[1]) // engine.runner.cache.max_tokens)
    assert engine.statistics.steps - steps == prompt + -(-(new - 1) // (DRAFTS + 1))
    token = events[new - 1].token_id
    monkeypatch.setattr(engine.language, "end_of_sequence", frozenset([token]))
    for stopping in load(), load(ignore_eos=True, stop=(f"w{token}",)):
        expected = run_plainly(engine, stopping)
        assert expected.events[0][-1].finish_reason == "stop"
        assert run_with(oracle, engine, stopping) == expected


def test_steps_with_and_without_drafts_and_empty_ranks_alternate(engine, compilations):
    """Sequences, and with that ranks, differ in the number of their drafts."""
    load = random_load(np.random.default_rng(77), content=False)
    expected = run_plainly(engine, load)
    oracle = Oracle()
    oracle.learn(load, expected.events)
    rng = np.random.default_rng(5)
    found = run_with(lambda ids, most: oracle(ids, int(rng.integers(0, 4))), engine, load)
    assert found == expected
    names = list(engine.statistics.steps_by_bucket)
    assert {name.split(" ")[0] for name in names} == {"prefill", "decode", "verify"}
    count = engine.runner.overlap.micro_batches(8)
    assert {name.split(" ")[-1] for name in names if "verify" in name} == {f"x{count}"}
    assert compilations() == 0


# Logits that are not finite


@pytest.mark.slow
def test_logits_that_are_not_finite_end_one_request_only_ahead(engine, compilations):
    """With drafts of the device, whose next step goes on from a token that does not count."""
    ends = []
    for seed in range(12):
        load = load_with_bad(np.random.default_rng(seed), content=seed % 2 == 1)
        clean = run_plainly(engine, load)
        with poisoned(engine, EMBEDDING, BAD):
            found = run(engine, load)
        engine.check()
        ends += check_until_bad(load, clean, found)
    assert min(ends.count(end) for end in ("at once", "later", "well")) > 3
    assert compilations() == 0


@pytest.mark.slow
def test_logits_that_are_not_finite_end_one_request_only(engine, compilations):
    """With drafts that are right up to them, and wrong ones."""
    ends = []
    for seed in range(8):
        load = load_with_bad(np.random.default_rng(seed), content=seed % 2 == 1)
        clean = run_plainly(engine, load)
        oracle = Oracle(seed % 4)
        oracle.learn(load, clean.events)
        with poisoned(engine, EMBEDDING, BAD):
            found = run_with(oracle, engine, load)
        ends += check_until_bad(load, clean, found)
    assert min(ends.count(end) for end in ("at once", "later", "well")) > 3
    assert compilations() == 0


@pytest.mark.parametrize("place", range(DRAFTS))
def test_a_draft_that_is_not_finite_does_no_harm(engine, place):
    """Its key is in a block with those before it; what it does to them is not theirs."""
    load = random_load(np.random.default_rng(5), content=False)
    clean = run_plainly(engine, load)
    given = {token for prompt in load.prompts for token in prompt}
    bad = max(set(range(VOCABULARY)) - given - {e.token_id for of in clean.events for e in of})
    oracle = Oracle()
    oracle.learn(load, clean.events)

    def propose(token_ids, most):
        drafts = oracle(token_ids, most)
        return [*drafts[:place], bad, *drafts[place + 1 :]][:most]

    drafted = engine.statistics.drafted_tokens
    with poisoned(engine, EMBEDDING, bad):
        assert run_with(propose, engine, load) == clean
    assert engine.statistics.drafted_tokens > drafted


# Ranks


def step_of(engine: Engine, lengths: list[list[int]], draft: bool) -> tuple[StepPlan, Rows]:
    """Sequences of so many random tokens on each rank; with `draft` all but the first are drafts."""
    rows = Rows(len(lengths), engine.scheduler.limits)
    ranks, proposed = [], {}
    counted = np.zeros_like(rows.num_tokens)
    for rank, counts in enumerate(lengths):
        sequences = []
        for row, count in enumerate(counts):
            rng = np.random.default_rng(8 * rank + row)  # the same whoever else takes part
            ids = tuple(rng.integers(0, VOCABULARY, 8).tolist())
            request = Request(8 * rank + row, ids[:1] if draft else ids[:count], SamplingParams())
            request.pages = [1 + 2 * row, 2 + 2 * row]
            rows.take(request, rank)
            if draft:
                rows.load(request)
                counted[rank, row] = count - 1
                proposed |= {request: ids[1:count]} if count > 1 else {}
            else:
                sequences.append(ScheduledSequence(request, count, True))
        ranks.append(sequences)
    return StepPlan(rows, ranks, counted, DRAFTS, proposed), rows


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_rank_gives_what_it_gives_alone(engine, data):
    """Any number of tokens on any rank, none included: one program, and nothing of the others."""
    draft = data.draw(st.booleans())
    longest = 1 + DRAFTS if draft else 4
    ranks = engine.runner.mesh.size
    count = st.lists(st.integers(1, longest), max_size=2)
    lengths = data.draw(st.lists(count, min_size=ranks, max_size=ranks).filter(any))
    dispatcher, runner = engine._dispatcher, engine.runner
    logits: list[np.ndarray] = []
    buckets = []

    def spy(bucket, buffers, *inputs):
        buckets.append(bucket)
        out, buffers = ModelRunner.run(runner, bucket, buffers, *inputs)
        logits.append(np.asarray(out.logits))
        return out, buffers

    def run(lengths):
        plan, rows = step_of(engine, lengths, draft)
        step = dispatcher.sample(dispatcher.start(plan, rows))
        read, _ = step.read()
        counts = [n if draft else 1 for of in lengths for n in of]
        return plan, [of[:n].tolist() for of, n in zip(read, counts, strict=True)], logits.pop()

    runner.run = spy
    try:
        plan, tokens, together = run(lengths)
        assert len(buckets) == 1 and buckets[0] == dispatcher.bucket_of(plan)
        tokens = iter(tokens)
        for rank, counts in enumerate(lengths):
            mine = [next(tokens) for _ in counts]
            if not counts:
                continue
            _, found, alone = run([of if r == rank else [] for r, of in enumerate(lengths)])
            assert found == mine
            rows = [
                [
                    place * (1 + bucket.drafts) + n
                    for place, of in enumerate(mine)
                    for n in range(len(of))
                ]
                for bucket in (buckets[0], buckets[-1])
            ]
            np.testing.assert_allclose(together[rank, rows[0]], alone[rank, rows[1]], atol=1e-5)
    finally:
        del runner.run
        engine._dispatcher.recover()  # the rows of the device are other ones
        engine.clear_prefix_cache()  # these steps wrote to pages of requests that have ended


def test_more_drafts_than_a_step_and_proposing_ahead_are_refused(engine):
    given = engine.runner, engine.tokenizer, engine.end_of_sequence
    sizes = dict(max_sequences=2, max_context=engine.max_context)
    with pytest.raises(
        ValueError, match="speculate is 8: expected less than max_batched_tokens, 8"
    ):
        Engine(*given, **sizes, speculate=8)
    with pytest.raises(ValueError, match="speculate must be at least 0, got -1"):
        Engine(*given, **sizes, speculate=-1)
    with pytest.raises(ValueError, match="look_ahead=True with propose: expected one of them"):
        Engine(*given, **sizes, speculate=2, propose=lambda ids, most: [], look_ahead=True)

"""USE_TBO=auto: what is timed, what is chosen, what is kept, and that all processes agree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax import LLM, Bucket, CacheConfig, ModelRunner, OverlapConfig, SamplingParams
from tbo_jax.checkpoint.load import load_model
from tbo_jax.engine.auto import decide as decide_module
from tbo_jax.engine.auto.decide import decide
from tbo_jax.engine.auto.trial import ROUNDS, TYPICAL, full_batch
from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import Golden

CACHE = CacheConfig(num_pages=32, page_size=4, pages_per_sequence=6, max_tokens=16)
DECODE, PREFILL = Bucket(4, 4, decode=True), Bucket(16, 4)
BUCKETS = [DECODE, PREFILL]
KJV = Path(__file__).parents[3] / "examples" / "kjv-moe"


@functools.cache
def model(name="qwen3_moe", devices=2):
    return load_model(Golden(name).folder, mesh=make_mesh(devices), dtype=np.float32)


class StandIn(ModelRunner):
    """Its programs compute nothing, so that many decisions take no time; the rest is real."""

    def __init__(self, name="qwen3_moe", devices=2, cache=CACHE, **options):
        options = {"overlap": OverlapConfig("auto", strategy="micro_batches")} | options
        super().__init__(model(name, devices), cache, mesh=make_mesh(devices), **options)
        self.made, self.ran = [], []
        self.not_compiling, self.not_running = set(), set()
        self.temporary = 0  # bytes

    def compile_programs(self, programs, progress=None):
        new = [p for p in programs if p not in self._compiled]
        self.made += new
        for program in new:
            compiled = self._compiled[program] = functools.partial(self._run, program)
            compiled.memory_analysis = lambda: SimpleNamespace(temp_size_in_bytes=self.temporary)
        return {
            p: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: compiling\nmore")
            for p in programs
            if p in self.not_compiling
        }

    def _run(self, program, weights, buffers, *packed):
        self.ran.append(program)
        if program in self.not_running:
            jax.tree.leaves(buffers)[0].delete()  # donated
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: running\nmore")
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffers))
        return packed[0], buffers


def table(times):
    """A timer that runs the step and gives the time in `times[bucket][strategy]`."""

    def timer(bucket, strategy, run):
        run()
        return times[bucket][strategy]

    return timer


OFF, SPLIT, CHUNKS = Strategy(), Strategy(micro_batches=2), Strategy(expert_chunks=2)
SPLIT_WINS, WHOLE_WINS, TIE = {OFF: 2.0, SPLIT: 1.5}, {OFF: 1.5, SPLIT: 2.0}, {OFF: 1.0, SPLIT: 1.0}
MIXED = table({DECODE: WHOLE_WINS, PREFILL: SPLIT_WINS})


def never(bucket, count, run):
    pytest.fail(f"{bucket} was timed")


def decide_with(runner, timer=MIXED, **options):
    decisions, buffers = decide(runner, BUCKETS, timer=timer, **options)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffers))
    for bucket, decision in decisions.items():
        assert runner.strategy(bucket) == decision.strategy
    assert set(runner._compiled) == {(b, runner.strategy(b)) for b in BUCKETS}
    return decisions


def counts(decisions):
    return [decisions[bucket].strategy.micro_batches for bucket in BUCKETS]


@pytest.fixture
def cache_folder(tmp_path):
    """A compilation cache is configured (and not in use)."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "tbo_decisions"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True)
def no_cache_folder():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("decode", [SPLIT_WINS, WHOLE_WINS, TIE], ids=str)
@pytest.mark.parametrize("prefill", [SPLIT_WINS, WHOLE_WINS, TIE], ids=str)
def test_split_exactly_where_it_is_faster(decode, prefill):
    runner = StandIn()
    times = {DECODE: decode, PREFILL: prefill}
    decisions = decide_with(runner, table(times))
    for bucket in BUCKETS:
        assert decisions[bucket].strategy.micro_batches == (2 if times[bucket] == SPLIT_WINS else 1)
        assert decisions[bucket].seconds == times[bucket]


@pytest.mark.parametrize(("split", "count"), [(1.98, 1), (1.94001, 1), (1.93, 2)])
def test_a_gain_within_the_margin_is_none(split, count):
    decisions = decide_with(
        StandIn(), table({bucket: {OFF: 2.0, SPLIT: split} for bucket in BUCKETS})
    )
    assert counts(decisions) == [count] * 2
    assert ("within the margin of 3%" in decisions[DECODE].reason) == (count == 1)


@pytest.mark.parametrize(("wins", "count"), [(4, 1), (5, 1), (6, 2), (7, 2)])
def test_rounds_that_disagree_are_noise_and_not_kept(cache_folder, wins, count):
    """The median says 25 % less; the rounds in which splitting lost say otherwise."""
    split = itertools.chain([1.5] * wins, [2.5] * (ROUNDS - wins))
    decisions = decide(
        StandIn(),
        [DECODE],
        timer=lambda bucket, n, run: 2.0 if n == OFF else next(split),
    )[0]
    assert decisions[DECODE].strategy.micro_batches == count
    assert ("noise" in decisions[DECODE].reason) == (count == 1)
    assert cache_folder.exists() == (count == 2)


@pytest.mark.parametrize(("temporary", "count"), [(100, 2), (101, 1)])
def test_a_split_program_that_has_no_memory_is_not_run(monkeypatch, temporary, count):
    """On several processes one that failed would leave the others in its collectives."""
    monkeypatch.setattr(decide_module, "free_memory", lambda mesh: 100)
    runner = StandIn()
    runner.temporary = temporary
    decisions = decide_with(runner, table(dict.fromkeys(BUCKETS, SPLIT_WINS)))
    assert counts(decisions) == [count] * 2
    assert (DECODE, SPLIT) in runner.made
    assert ((DECODE, SPLIT) in runner.ran) == (count == 2)
    if count == 1:
        assert decisions[DECODE].reason == (
            "the program micro_batches 2 failed: it needs 101 bytes, and 100 are free"
        )


def test_a_split_program_that_fails_on_one_of_several_processes_ends_it(monkeypatch):
    """The others may wait in a collective of it, and learn from its end that it will not come."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    runner = StandIn()
    runner.not_running = {(DECODE, SPLIT)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: running"):
        decide_with(runner, gather=lambda values: np.stack([values, np.zeros_like(values)]))


def test_the_median_counts_and_the_programs_take_turns():
    runner = StandIn()
    whole = iter([1.0] * 4 + [9.0] * 3)  # median 1.0, mean above 2.0
    timer = lambda bucket, one, run: next(whole) if one == OFF else 2.0  # noqa: E731
    decisions = decide(runner, [DECODE], timer=timer)[0]
    assert decisions[DECODE].seconds == {OFF: 1.0, SPLIT: 2.0}
    runner = StandIn()
    decide_with(runner)
    of_decode = [count for bucket, count in runner.ran if bucket == DECODE]
    assert of_decode[:6] == [OFF, SPLIT, OFF, SPLIT, SPLIT, OFF]
    assert len(of_decode) == 2 * (ROUNDS + 1)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("count", [OFF, SPLIT], ids=str)
def test_a_time_that_is_none_decides_nothing(cache_folder, count, broken):
    """Of either program; the other bucket is decided as ever, and the first is timed again."""
    times = table({DECODE: SPLIT_WINS | {count: broken}, PREFILL: SPLIT_WINS})
    decisions = decide_with(StandIn(), times)
    assert counts(decisions) == [1, 2]
    assert (decisions[DECODE].reason, decisions[DECODE].seconds) == ("no time could be taken", {})
    assert len(list(cache_folder.iterdir())) == 1
    assert counts(decide_with(StandIn(), table({DECODE: SPLIT_WINS}))) == [2, 2]


def test_the_reason_and_the_log_say_by_how_much(caplog):
    caplog.set_level(logging.DEBUG, "tbo_jax")
    decisions = decide_with(StandIn(), table({DECODE: TIE, PREFILL: SPLIT_WINS}))
    assert decisions[PREFILL].reason == (
        "measured now: off takes 2000.000 ms, micro_batches 2 takes 1500.000 ms (25.0% less)"
    )
    assert "(the same time)" in decisions[DECODE].reason
    assert [r.getMessage() for r in caplog.records if r.name == "tbo_jax.engine.auto.decide"] == [
        f"{b}: {d.strategy}: {d.reason}" for b, d in decisions.items()
    ]


@pytest.mark.parametrize(
    ("options", "timer", "reason"),
    [
        ({}, None, "XLA:CPU runs collectives in line with compute, so nothing overlaps"),
        ({"devices": 1}, never, "no communication between devices"),
        ({"name": "llama"}, never, "no communication between devices"),
        ({"overlap": OverlapConfig("auto", min_tokens=17)}, never, "fewer .* than min_tokens, 17"),
    ],
)
def test_nothing_is_timed_or_compiled_where_splitting_cannot_pay(options, timer, reason, caplog):
    runner = StandIn(**options)
    decisions = decide_with(runner, timer)
    assert runner.made == [(DECODE, OFF), (PREFILL, OFF)]
    assert runner.ran == []
    for decision in decisions.values():
        assert (decision.strategy, decision.seconds) == (OFF, {})
        assert re.search(reason, decision.reason)
    assert not caplog.records


def test_a_bucket_that_was_not_decided_is_not_split():
    runner = StandIn()
    assert [runner.strategy(b) for b in BUCKETS] == [OFF, OFF]
    assert len(runner.allocate().work) == 2


@pytest.mark.parametrize("mode", ["off", "on"])
def test_other_modes_have_nothing_to_decide(mode):
    runner = StandIn(overlap=OverlapConfig(mode))
    with pytest.raises(ValueError, match=f"mode '{mode}': expected 'auto'"):
        decide(runner, BUCKETS)


def test_only_candidates_can_be_chosen():
    with pytest.raises(
        ValueError, match="strategy micro_batches 3 for decode 4: expected one of off, mic"
    ):
        StandIn().choose(DECODE, Strategy(3))


# Failures


def test_a_split_program_that_does_not_compile_is_not_chosen(cache_folder):
    runner = StandIn()
    runner.not_compiling = {(PREFILL, SPLIT)}
    decisions = decide_with(runner)
    assert counts(decisions) == [1, 1]
    assert decisions[PREFILL].reason == (
        "the program micro_batches 2 failed: RESOURCE_EXHAUSTED: compiling"
    )
    assert len(list(cache_folder.iterdir())) == 1  # it is tried again when there is more memory


def test_a_split_program_that_does_not_run_is_not_chosen():
    runner = StandIn()
    runner.not_running = {(DECODE, SPLIT)}
    decisions = decide_with(runner)  # checks that the buffers are usable
    assert counts(decisions) == [1, 2]
    assert (
        decisions[DECODE].reason
        == "the program micro_batches 2 failed: RESOURCE_EXHAUSTED: running"
    )


@pytest.mark.parametrize("when", ["not_compiling", "not_running"])
def test_a_whole_program_that_fails_is_an_error(when):
    runner = StandIn()
    setattr(runner, when, {(DECODE, OFF)})
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        decide_with(runner)


# Several processes


def process_of(gathered):
    """Gather functions of process 0, which records, and of process 1, which sees those arrays."""

    def first(values):
        gathered.append(values)
        return np.stack([values, np.zeros_like(values)])

    def second(values):
        of_first = gathered.pop(0)
        assert of_first.shape == values.shape
        return np.stack([of_first, values])

    return first, second


def test_processes_agree_although_they_measured_otherwise():
    first, second = process_of([])
    one = decide_with(StandIn(), gather=first)
    opposite = table({DECODE: SPLIT_WINS, PREFILL: WHOLE_WINS})
    two = decide_with(StandIn(), opposite, gather=second)
    assert one == two
    assert counts(two) == [1, 2]


def test_processes_agree_on_what_process_0_has_on_disk(cache_folder):
    decide_with(StandIn())
    first, second = process_of([])
    one = decide_with(StandIn(), never, gather=first)
    for file in cache_folder.iterdir():
        file.unlink()
    two = decide_with(StandIn(), never, gather=second)
    assert one == two
    assert counts(two) == [1, 2]


def test_nothing_is_taken_from_the_disk_of_another_process(cache_folder, monkeypatch):
    decide_with(StandIn())
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    decisions = decide_with(StandIn(), table({DECODE: SPLIT_WINS, PREFILL: WHOLE_WINS}))
    assert counts(decisions) == [2, 1]
    monkeypatch.undo()
    assert counts(decide_with(StandIn(), never)) == [1, 2]  # and nothing was written there


@pytest.mark.parametrize("call", [1, 2, 3], ids=["compiling", "memory", "running"])
def test_a_failure_on_one_process_is_one_on_all(call):
    calls = []

    def gather(values):
        calls.append(values)
        other = np.ones_like(values) if len(calls) - 1 == call else np.zeros_like(values)
        return np.stack([values, other])

    decisions = decide_with(StandIn(), gather=gather)
    assert counts(decisions) == [1, 1]
    assert decisions[PREFILL].reason == "the program micro_batches 2 failed: on another process"


# Three strategies


def of_three(timer, **options):
    runner = StandIn(overlap=OverlapConfig("auto"), **options)
    return decide_with(runner, timer), runner


@pytest.mark.parametrize(
    ("times", "strategy"),
    [
        ((2.0, 1.5, 1.4), CHUNKS),
        ((2.0, 1.4, 1.5), SPLIT),
        ((2.0, 2.1, 1.9), CHUNKS),
        ((2.0, 2.1, 1.96), OFF),  # within the margin
        ((2.0, 2.0, 2.0), OFF),
        ((2.0, 1.5, 1.5), SPLIT),
    ],
)
def test_the_fastest_is_chosen_and_a_tie_keeps_off(times, strategy):
    seconds = dict(zip((OFF, SPLIT, CHUNKS), times, strict=True))
    decisions, runner = of_three(lambda bucket, one, run: seconds[one])
    assert [decisions[bucket].strategy for bucket in BUCKETS] == [strategy] * 2
    assert len(runner.made) == 6
    told = json.loads(json.dumps(decisions[DECODE].to_json()))
    assert told["strategy"] == str(strategy)
    assert told["seconds"] == {str(one): value for one, value in seconds.items()}
    assert told["gains"]["expert_chunks 2"] == pytest.approx(times[0] / times[2])
    assert "expert_chunks 2 takes" in told["reason"]


def test_one_that_fails_leaves_the_others(cache_folder):
    runner = StandIn(overlap=OverlapConfig("auto"))
    runner.not_running = {(DECODE, CHUNKS)}
    runner.not_compiling = {(PREFILL, SPLIT)}
    seconds = {OFF: 2.0, SPLIT: 1.5, CHUNKS: 1.0}
    decisions = decide_with(runner, lambda bucket, one, run: run() or seconds[one])
    assert [decisions[bucket].strategy for bucket in BUCKETS] == [SPLIT, CHUNKS]
    assert decisions[DECODE].seconds == {OFF: 2.0, SPLIT: 1.5}
    assert not cache_folder.exists()  # timed anew at the next start


def test_a_noisy_one_is_left_out():
    turns = itertools.count()

    def timer(bucket, one, run):
        return {OFF: 2.0, SPLIT: 1.8}.get(one) or (1.0 if next(turns) % 2 else 3.0)

    decisions, _ = of_three(timer)
    assert decisions[DECODE].strategy == SPLIT


def test_chunks_are_no_candidate_without_experts_for_each():
    runner = StandIn(devices=8, overlap=OverlapConfig("auto", num_expert_chunks=2))
    assert runner.candidates(DECODE) == (OFF, SPLIT)  # one expert a device


def test_three_strategies_are_kept(cache_folder):
    seconds = {OFF: 2.0, SPLIT: 1.5, CHUNKS: 1.0}
    of_three(lambda bucket, one, run: seconds[one])
    decisions, runner = of_three(never)
    assert [decisions[bucket].strategy for bucket in BUCKETS] == [CHUNKS] * 2
    assert runner.made == [(bucket, CHUNKS) for bucket in BUCKETS]


# On disk


def test_a_decision_is_kept(cache_folder):
    first = decide_with(StandIn())
    assert len(list(cache_folder.iterdir())) == 2
    runner = StandIn()
    again = decide_with(runner, never)
    assert counts(again) == counts(first) == [1, 2]
    assert [d.seconds for d in again.values()] == [d.seconds for d in first.values()]
    assert again[PREFILL].reason == first[PREFILL].reason.replace("now", "at an earlier start")
    assert runner.made == [(DECODE, OFF), (PREFILL, SPLIT)]  # the others are not even compiled


def test_a_kept_split_that_does_not_compile_any_more(cache_folder):
    decide_with(StandIn())
    runner = StandIn()
    runner.not_compiling = {(PREFILL, SPLIT)}
    assert counts(decide_with(runner, never)) == [1, 1]


def test_a_person_can_read_it(cache_folder):
    decide_with(StandIn())
    files = {file.name: json.loads(file.read_text()) for file in cache_folder.iterdir()}
    (found,) = [f for f in files.values() if f["key"]["bucket"]["decode"]]
    assert (found["strategy"], found["seconds"]) == ("off", {"off": 1.5, "micro_batches 2": 2.0})
    key = found["key"]
    assert key["bucket"] == {"tokens": 4, "sequences": 4, "decode": True, "drafts": 0}
    assert key["cache"] == dataclasses.asdict(CACHE)
    assert key["jax"] == jax.__version__
    assert (key["device_kind"], key["processes"]) == ("cpu", 1)
    assert key["devices"] == {"nodes": 1, "ranks": 2, "tensor": 1}
    assert (key["model"]["model_type"], key["model"]["dtype"]) == ("qwen3_moe", "float32")
    assert (key["transport"], key["scanned"], key["logits"]) == ("all_to_all", False, "last")
    assert set(key["compiler_options"]) == {"off", "micro_batches 2"}


@pytest.mark.parametrize(
    "options",
    [
        {"cache": dataclasses.replace(CACHE, num_pages=33)},
        {"overlap": OverlapConfig("auto", num_micro_batches=3, strategy="micro_batches")},
        {"transport": "all_gather"},
        {"logits": "all"},
        {"name": "qwen3_moe_mixed"},
        {"devices": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_runner_is_timed_anew(cache_folder, options):
    decide_with(StandIn())
    runner = StandIn(**options)
    decisions = decide_with(runner, lambda b, strategy, run: float(strategy.micro_batches))
    assert len(runner.made) == 4
    assert counts(decisions) == [1, 1]


def test_other_compiler_options_are_timed_anew(cache_folder):
    decide_with(StandIn())
    runner = StandIn()
    runner.compiler_options = lambda strategy: {"xla_option": str(strategy)}
    assert counts(decide_with(runner, lambda b, one, run: float(one.micro_batches))) == [1, 1]


@pytest.mark.parametrize("module", ["jax", "jaxlib"])
def test_another_version_is_timed_anew(cache_folder, monkeypatch, module):
    decide_with(StandIn())
    monkeypatch.setattr(f"tbo_jax.engine.auto.store.{module}.__version__", "0.0.1")
    assert counts(decide_with(StandIn(), lambda b, one, run: float(one.micro_batches))) == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("all_to_all", "all_gather"),  # of another key
        lambda text: text.replace('"off": ', '"off": NaN, "0": '),
        lambda text: text.replace('"off": ', '"off": -'),
        lambda text: text.replace('"off": ', '"5": '),
        lambda text: text.replace('"strategy": "', '"strategy": "7'),
    ],
)
def test_a_file_that_is_no_decision_is_passed_over(cache_folder, caplog, change):
    decide_with(StandIn())
    for file in cache_folder.iterdir():
        file.write_text(change(file.read_text()))
    decisions = decide_with(StandIn(), table({DECODE: SPLIT_WINS, PREFILL: WHOLE_WINS}))
    assert counts(decisions) == [2, 1]
    warned = [r.getMessage() for r in caplog.records]
    assert len(warned) == 2
    assert all("is not a usable decision, the bucket is timed anew" in text for text in warned)
    assert counts(decide_with(StandIn(), never)) == [2, 1]  # written anew, too


def test_a_folder_that_cannot_be_made_is_no_error(cache_folder, caplog):
    cache_folder.write_text("a file")
    assert counts(decide_with(StandIn())) == [1, 2]
    assert any("the decision is not kept" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("folder", [None, "gs://bucket/cache"])
def test_nothing_is_kept_without_a_local_compilation_cache(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", folder)
    decide_with(StandIn())
    assert list(tmp_path.iterdir()) == []


# The batch, and the whole engine


def test_typical_prompts_and_contexts_are_timed():
    """Not half of a page table for a million tokens, and not the bucket spread thinly over rows."""
    cache = CacheConfig(num_pages=4096, page_size=16, pages_per_sequence=2**16, max_tokens=8192)
    decoding = full_batch(Bucket(6, 6, True), cache, 160, 1)
    assert decoding.context_lens[0].tolist() == [256, 1024, 4096] * 2
    assert decoding.query_lens[0].tolist() == [1] * 6
    prompts = full_batch(Bucket(2048, 16), cache, 160, 1)
    assert prompts.query_lens[0, :4].tolist() == [256, 1024, 768, 0]
    verifying = full_batch(Bucket(12, 4, True, 2), cache, 160, 1)
    assert verifying.query_lens[0].tolist() == [3] * 4
    crowded = full_batch(Bucket(8192, 2), cache, 160, 1)
    assert crowded.query_lens[0].tolist() == [8192 - 1024, 1024]


@given(
    tokens=st.integers(1, 40),
    sequences=st.integers(1, 12),
    decode=st.booleans(),
    num_pages=st.integers(2, 20),
    page_size=st.integers(1, 5),
    columns=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_the_batch_fills_its_bucket(tokens, sequences, decode, num_pages, page_size, columns):
    bucket = Bucket(sequences, sequences, True) if decode else Bucket(tokens, sequences)
    room = columns * page_size
    batch = full_batch(bucket, CacheConfig(num_pages, page_size, columns, 40), 160, 3)
    most = min(bucket.tokens, min(bucket.tokens, sequences) * room)
    np.testing.assert_array_equal(batch.num_tokens, most)
    rows = batch.num_sequences[0]
    lengths, contexts = batch.query_lens[0, :rows], batch.context_lens[0, :rows]
    assert (lengths > 0).all()
    assert lengths.max() - lengths.min() <= 1 or not decode
    ends = batch.context_lens + batch.query_lens
    assert (ends <= room).all()
    typical = np.resize(TYPICAL, rows)
    np.testing.assert_array_equal(contexts, np.minimum(typical, room - lengths))
    used = -(-ends // page_size)
    for table_row, count in zip(batch.page_table.reshape(-1, columns), used.reshape(-1)):
        assert ((table_row[:count] > 0) & (table_row[:count] < num_pages)).all()
        assert (table_row[count:] == 0).all()
    assert ((batch.token_ids >= 0) & (batch.token_ids < 160)).all()
    assert batch.token_ids.shape == (3, bucket.tokens)


def kjv(mode, devices, rows=1):
    return LLM(
        KJV, devices=devices, dtype="float32", compilation_cache=False,
        overlap=OverlapConfig(mode, strategy="micro_batches"),
        max_context=64, max_sequences=rows, max_batched_tokens=16,
        scanned=True,  # compiles sooner
    )  # fmt: skip


PROMPTS = ["In the beginning God", "And Jesus said unto them, Take heed that no man", "Blessed"]


def generate(llm):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    return [done.token_ids for done in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected():
    return generate(kjv("off", 1))


@pytest.mark.slow
def test_auto_on_one_device(expected, compilations):
    llm = kjv("auto", 1)
    before = compilations()
    assert generate(llm) == expected
    assert compilations() == before
    stats = json.loads(json.dumps(llm.statistics))
    assert stats["use_tbo"] == "auto"
    assert stats["steps_split"] == 0
    assert list(stats["decisions"]) == ["decode 1", "prefill 16"]
    reasons = [d["reason"] for d in stats["decisions"].values()]
    assert ["min_tokens" in r for r in reasons] == [True, False]
    assert ["no communication" in r for r in reasons] == [False, True]
    llm.engine.add(llm.encode(PROMPTS[0]), SamplingParams())
    with pytest.raises(RuntimeError, match="pages of unfinished requests"):
        llm.engine.warm_up()


@pytest.mark.slow
def test_auto_on_four_devices(expected, compilations):
    llm = kjv("auto", 4, rows=2)
    runner = llm.engine.runner
    assert generate(llm) == expected
    decided = llm.statistics["decisions"]
    assert [d["micro_batches"] for d in decided.values()] == [1, 1, 1]
    assert "XLA:CPU" in decided["prefill 16"]["reason"]
    assert llm.statistics["steps_split"] == 0
    assert runner.num_compiled == 3

    seen, compiled = [], []

    def timer(bucket, strategy, run):
        run()
        compiled.append(compilations())
        count = strategy.micro_batches
        return float(count) if bucket.decode else 1 / count

    llm.engine.warm_up(lambda *done: seen.append(done), timer)
    assert seen == [(4, 5), (5, 5)]  # the first three were compiled already
    assert len(set(compiled)) == 1  # nothing compiles while times are taken
    decided = json.loads(json.dumps(llm.statistics["decisions"]))
    assert [d["micro_batches"] for d in decided.values()] == [1, 1, 2]
    assert decided["prefill 16"]["seconds"] == {"off": 1.0, "micro_batches 2": 0.5}
    assert runner.num_compiled == 3  # the slower ones are dropped
    assert generate(llm) == expected
    assert compilations() == compiled[0]
    assert llm.statistics["steps_split"] == llm.statistics["steps_by_bucket"]["prefill 16 x2"] > 0

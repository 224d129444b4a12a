"""Requests are served while programs are compiled: no step waits, and the tokens are the same."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import jax
import numpy as np
import pytest

from tbo_jax import OverlapConfig
from tbo_jax.engine.compiling import Compiling, check_serves_early, serves_early
from tbo_jax.engine.dispatch import Dispatcher
from tbo_jax.engine.engine import Engine
from tests.engine.engines import small_llm, wait_for
from tests.engine.loads import random_load, run
from tests.golden_cases import with_tokenizer

OPTIONS = dict(max_sequences=4, max_batched_tokens=64, num_pages=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(
    scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)], ids="{}".format
)
def whole(folder, request) -> Engine:
    """Its programs are all compiled; with and without drafts."""
    return small_llm(folder, speculate=request.param, **OPTIONS).engine


class Gate:
    """Lets the thread that compiles through for one bucket at a time."""

    def __init__(self, monkeypatch, fail=()) -> None:
        self.compiled, self._turns = [], threading.Semaphore(0)
        compile_further = Dispatcher.compile_further

        def wait(dispatcher: Dispatcher, bucket) -> None:
            assert self._turns.acquire(timeout=60)
            if bucket in fail:
                raise jax.errors.JaxRuntimeError("no")
            compile_further(dispatcher, bucket)
            self.compiled.append(bucket)

        monkeypatch.setattr(Dispatcher, "compile_further", wait)

    def open(self, times: int) -> None:
        for _ in range(times):
            self._turns.release()


def early(engine: Engine) -> Engine:
    """Another engine with the same steps, that has the first of them."""
    other = Engine(
        engine.runner,
        engine.tokenizer,
        engine.end_of_sequence,
        max_sequences=engine.max_sequences,
        max_context=engine.max_context,
        speculate=engine.speculate,
    )
    other.warm_up(early=True)
    return other


def used(engine: Engine) -> set[str]:
    """Names of the buckets that steps had."""
    return {name.removesuffix(" x1") for name in engine.statistics.steps_by_bucket}


def test_steps_take_the_smallest_bucket_that_is_there(whole, monkeypatch, compilations):
    gate = Gate(monkeypatch)
    engine = early(whole)
    kinds = 3 if whole.speculate else 2
    assert engine.counts()["shapes_compiled"] == kinds < engine.counts()["shapes"]
    loads = [random_load(np.random.default_rng(seed), content=False) for seed in range(4)]
    expected = [run(whole, load) for load in loads]
    before = compilations()
    assert [run(engine, load) for load in loads] == expected
    assert compilations() == before  # none waited for a compiler
    assert len(used(engine)) <= kinds

    further = len(engine.buckets) - kinds
    gate.open(1)
    wait_for(lambda: engine.counts()["shapes_compiled"] == kinds + 1)
    [smallest] = gate.compiled
    assert smallest.tokens == 1
    assert [run(engine, load) for load in loads] == expected
    assert str(smallest) in used(engine) and len(used(engine)) <= kinds + 1
    assert not engine.finish_warm_up(0)

    gate.open(further)
    assert engine.finish_warm_up(60)
    sizes = [bucket.tokens for bucket in gate.compiled]
    assert sizes == sorted(sizes) and len(sizes) == further
    assert engine.counts()["shapes_compiled"] == len(engine.buckets)
    assert [run(engine, load) for load in loads] == expected
    assert used(engine) == used(whole)


def test_a_bucket_that_fails_is_left_out(whole, monkeypatch, caplog):
    Gate(monkeypatch, fail=[whole.buckets[0]]).open(len(whole.buckets))
    with caplog.at_level(logging.ERROR):
        engine = early(whole)
        assert engine.finish_warm_up(60)
    assert str(whole.buckets[0]) in caplog.text and "larger steps" in caplog.text
    load = random_load(np.random.default_rng(9), content=False)
    assert run(engine, load) == run(whole, load)
    assert str(whole.buckets[0]) not in used(engine)
    engine.warm_up()
    assert engine.counts()["shapes_compiled"] == len(engine.buckets)


def test_a_second_warm_up_takes_over(whole, monkeypatch):
    gate = Gate(monkeypatch)
    engine = early(whole)
    gate.open(1)  # a thread in the midst of a bucket ends with that
    engine.warm_up()
    assert len(gate.compiled) <= 1 and engine.finish_warm_up(0)
    assert engine.counts()["shapes_compiled"] == len(engine.buckets)


def test_an_engine_that_nobody_needs_compiles_no_further(whole, monkeypatch):
    gate = Gate(monkeypatch)
    engine = early(whole)
    kept, compiling = weakref.ref(engine), engine._compiling
    del engine
    gc.collect()
    assert kept() is None
    gate.open(len(whole.buckets))
    assert compiling.wait(60) and len(gate.compiled) <= 1


def test_a_thread_books_its_seconds_and_stops():
    seconds: list[float] = []
    compiling = Compiling([1, 2, 3], lambda bucket: None, seconds.append)
    assert compiling.wait(60) and len(seconds) == 3 and min(seconds) >= 0
    compiling.stop()


def test_where_requests_are_served_early(monkeypatch):
    off, auto = OverlapConfig("off"), OverlapConfig("auto")
    assert serves_early(None, True, off, "cpu") and serves_early(None, True, off, "tpu")
    assert not serves_early(None, True, off, "gpu")  # XLA tries kernels out there
    assert not serves_early(None, False, off, "cpu")
    assert serves_early(True, False, off, "gpu") and not serves_early(False, True, off, "cpu")
    assert not serves_early(None, True, auto, "tpu")
    with pytest.raises(ValueError, match="serve_early=True with USE_TBO=auto"):
        serves_early(True, False, auto, "cpu")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not serves_early(None, True, off, "cpu")
    with pytest.raises(ValueError, match="serve_early=True in 2 processes"):
        check_serves_early(off)


def test_auto_is_refused_before_the_weights_are_read(folder, tmp_path):
    for file in folder.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="serve_early=True with USE_TBO=auto"):
        small_llm(tmp_path, mode="auto", serve_early=True)


@pytest.mark.slow
def test_programs_compile_while_requests_run(folder):
    """Real compilers beside real steps, with programs that no other engine has."""
    ours = small_llm(folder, 4, "on", serve_early=True, **OPTIONS)
    loads = [random_load(np.random.default_rng(seed), content=False) for seed in range(12)]
    found = [run(ours.engine, load) for load in loads]
    assert ours.engine.finish_warm_up(300)
    theirs = small_llm(folder, 4, "on", **OPTIONS)
    assert found == [run(theirs.engine, load) for load in loads]
    assert ours.snapshot()["shapes_compiled"] == ours.snapshot()["shapes"]

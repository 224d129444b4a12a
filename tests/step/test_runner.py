"""The compiled step: donation, no copies, no recompilation, and what USE_TBO changes in it."""

from __future__ import annotations

import dataclasses
import re
import threading

import jax
import numpy as np
import pytest

from tbo_jax import Bucket, CacheConfig, ForwardBatch, ModelRunner, OverlapConfig
from tbo_jax.checkpoint.load import load_model
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.step.forward import forward
from tests.golden_cases import Golden

# Numbers that no other array of the program has, so that a copy of the cache shows by its shape.
CACHE = CacheConfig(num_pages=77, page_size=4, pages_per_sequence=6, max_tokens=16)
DECODE, PREFILL = Bucket(4, 4, decode=True), Bucket(16, 4)


def make_runner(*, devices, micro_batches=1, scanned=False, transport="all_to_all", tensor=1):
    mesh = make_mesh(devices, tensor=tensor)
    model = load_model(Golden("qwen3_moe").folder, mesh=mesh, dtype=np.float32, scanned=scanned)
    overlap = OverlapConfig("on" if micro_batches > 1 else "off")
    return ModelRunner(model, CACHE, mesh=mesh, overlap=overlap, transport=transport)


def batch_of(bucket, devices, tokens=((5, 6, 7), (8,))):
    pages = [[1, 2], [3]]
    tokens = [t[:1] if bucket.decode else t for t in tokens]
    one = ForwardBatch.pack(
        tokens,
        [0] * len(tokens),
        pages[: len(tokens)],
        token_capacity=bucket.tokens,
        sequence_capacity=bucket.sequences,
        pages_per_sequence=CACHE.pages_per_sequence,
    )
    return stack_batches([one] * devices)


def bytes_per_device(tree, devices):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) // devices


SLOW = pytest.mark.slow


@pytest.mark.parametrize("scanned", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize(
    ("devices", "micro_batches"),
    [(1, 1), pytest.param(1, 2, marks=SLOW), pytest.param(4, 1, marks=SLOW), (4, 2)],
)
def test_cache_is_updated_in_place(devices, micro_batches, scanned):
    runner = make_runner(devices=devices, micro_batches=micro_batches, scanned=scanned)
    buffers = runner.allocate()
    compiled = runner.compile(PREFILL)
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == bytes_per_device(buffers, devices)
    rows = CACHE.num_pages * (runner.config.num_layers if scanned else 1)
    shape = rf"\[{rows},{CACHE.page_size},"
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(rf"= \S*{shape}\S* copy(-start)?\(", line)
    ]
    assert not copies
    assert re.search(rf"f32{shape}", compiled.as_text())  # the pattern does match its shape
    logits, after = runner.step(PREFILL, buffers, batch_of(PREFILL, devices))
    jax.block_until_ready(logits)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(buffers))
    assert all(
        new.sharding.is_equivalent_to(old.sharding, new.ndim)
        for old, new in zip(jax.tree.leaves(buffers), jax.tree.leaves(after), strict=True)
    )


def test_unused_donation_is_an_error(monkeypatch):
    runner = make_runner(devices=1)

    def loses_its_buffers(*args, **kwargs):
        logits, buffers = forward(*args, **kwargs)
        return logits, dataclasses.replace(buffers, cache=None)

    monkeypatch.setattr("tbo_jax.step.runner.forward", loses_its_buffers)
    with pytest.raises(UserWarning, match="donated buffers were not usable"):
        runner.compile(DECODE)


def test_one_set_of_work_buffers_without_overlap():
    assert len(make_runner(devices=1).allocate().work) == 1
    assert len(make_runner(devices=1, micro_batches=2).allocate().work) == 2


def test_memory_that_the_overlap_takes_is_told():
    """Five arrays of int32 for each of `max_tokens`, a set for each micro-batch."""
    whole, split = (make_runner(devices=2, micro_batches=count) for count in (1, 2))
    one_set = 5 * 4 * CACHE.max_tokens
    memory = whole.memory()
    assert memory["cache_bytes"] == bytes_per_device(whole.allocate().cache, 2)
    assert memory["work_bytes"] == one_set and memory["temporary_bytes"] == {}
    buffers = split.allocate()
    assert split.memory()["work_bytes"] == 2 * one_set == bytes_per_device(buffers.work, 2)
    analysis = split.compile(DECODE).memory_analysis()
    weights_and_inputs = analysis.argument_size_in_bytes - bytes_per_device(buffers, 2)
    assert 0 < weights_and_inputs - memory["weight_bytes"] < 1000  # of the inputs
    assert split.memory()["temporary_bytes"] == {"decode 4 x2": analysis.temp_size_in_bytes}
    assert analysis.temp_size_in_bytes > 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_barriers_only_with_overlap(micro_batches):
    text = make_runner(devices=4, micro_batches=micro_batches).lower(PREFILL).as_text()
    assert text.count("all_to_all") >= 2 * 2 * micro_batches  # two a layer and micro-batch
    assert ("optimization_barrier" in text) == (micro_batches > 1)


@pytest.mark.parametrize("tensor", [1, 2])
def test_sizes_of_ragged_messages_wait_for_the_message_before(tensor):
    """All but the first: before it nothing was sent, or with tensor parallelism a sum was."""

    def barriers(transport, micro_batches):
        runner = make_runner(
            devices=4, micro_batches=micro_batches, transport=transport, tensor=tensor
        )
        return runner.lower(PREFILL).as_text().count("optimization_barrier")

    more = barriers("ragged_all_to_all", 2) - barriers("all_to_all", 2)
    layers = make_runner(devices=4).config.num_layers
    assert more == 2 * layers - (tensor == 1)
    assert barriers("ragged_all_to_all", 1) == 0


def test_steps_of_all_kinds_alternate_without_compiling(compilations):
    runner = make_runner(devices=4, micro_batches=2)
    buckets = [Bucket(1, 1, decode=True), DECODE, PREFILL]
    assert [runner.strategy(b).micro_batches for b in buckets] == [1, 2, 2]  # unsplit and split
    buffers = runner.allocate()
    runner.compile_all(buckets)
    for bucket in buckets:
        jax.block_until_ready(runner.step(bucket, runner.allocate(), batch_of(bucket, 4, ((5,),))))
    before = compilations()
    for tokens in (((5, 6), (7,)), (), ((5,),), ((9, 9, 9), (1,))):
        for bucket in buckets:
            batch = batch_of(bucket, 4, tokens[: bucket.sequences])
            logits, buffers = runner.step(bucket, buffers, batch)
    jax.block_until_ready(logits)
    assert compilations() == before
    assert runner.num_compiled == 3


@pytest.fixture(scope="module")
def runner():
    return make_runner(devices=4, micro_batches=2)


def test_a_batch_may_be_overwritten_at_once(runner):
    """JAX would read arrays that are aligned so where they are, while the step runs."""

    def aligned(values):
        raw = np.zeros(values.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        staged = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        staged[...] = values
        return staged

    batch = batch_of(PREFILL, 4, (tuple(range(1, 11)), (8, 9)))
    expected = np.asarray(runner.step(PREFILL, runner.allocate(), batch)[0])
    staged = jax.tree.map(aligned, batch)
    logits, _ = runner.step(PREFILL, runner.allocate(), staged)
    for leaf in jax.tree.leaves(staged):
        leaf[...] = 0
    np.testing.assert_array_equal(np.asarray(logits)[:, :2], expected[:, :2])


def test_padding_changes_no_live_bit(runner):
    """The same tokens with other garbage in the padding give the same bits."""
    results = []
    for garbage in (0, 1):
        batch = batch_of(PREFILL, 4)
        live = int(batch.num_tokens[0])
        batch.token_ids[:, live:] = garbage * 99
        batch.positions[:, live:] = garbage * 7
        batch.sequence_ids[:, live:] = garbage * 3
        batch.page_table[:, 2:] = garbage * 1
        logits, buffers = runner.step(PREFILL, runner.allocate(), batch)
        pages = jax.tree.map(np.asarray, jax.tree.leaves(buffers.cache))
        results.append((np.asarray(logits)[:, :2], pages))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    for first, second in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(first, second)


def test_padding_reaches_no_expert():
    """Three live tokens of sixteen: no more than three a rank are ever marked for an expert."""
    runner = make_runner(devices=1)
    seen = []
    exchange = runner._exchange

    class Spy:
        def __getattr__(self, name):
            return getattr(exchange, name)

        def pack(self, hidden, experts, weights, arrived):
            jax.debug.callback(lambda e: seen.append(np.asarray(e)), experts)
            return exchange.pack(hidden, experts, weights, arrived)

    runner._exchange = Spy()
    logits, _ = runner.step(PREFILL, runner.allocate(), batch_of(PREFILL, 1, ((5, 6, 7),)))
    jax.block_until_ready(logits)
    jax.effects_barrier()
    assert len(seen) == runner.config.num_layers
    for experts in seen:
        assert (experts[:3] >= 0).all()
        assert (experts[3:] == -1).all()


@pytest.mark.parametrize("cores", [1, 4, 64])
def test_as_many_programs_compile_at_a_time_as_there_are_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    expected = {1: 2, 4: 4, 64: 8}[cores]
    together = threading.Barrier(expected)

    class Waits:
        def compile(self, options):
            return together.wait(timeout=60)

    runner = make_runner(devices=1)
    monkeypatch.setattr(runner, "lower", lambda *program: Waits())
    runner.compile_all([Bucket(n, n, True) for n in range(1, 2 * expected + 1)])
    assert runner.num_compiled == 2 * expected

"""Every device issues the same collectives, whatever tokens its rank has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tbo_jax import Bucket, CacheConfig, ModelRunner, OverlapConfig, SamplingParams
from tbo_jax.checkpoint.load import load_model
from tbo_jax.engine.dispatch import Dispatcher
from tbo_jax.engine.row_state import SampledSteps
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import Golden

COLLECTIVES = ("psum", "all_to_all", "all_gather", "reduce_scatter", "ppermute", "pmax", "pmin")
CACHE = CacheConfig(num_pages=9, page_size=4, pages_per_sequence=8, max_tokens=16)


# One program


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """For each request its prompt and new tokens, the step it comes at, and if it has drafts."""
    row = st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 6), st.booleans())
    return draw(st.lists(row, min_size=1, max_size=12))


@settings(max_examples=100, deadline=None)
@given(workloads(), st.integers(1, 4), st.sampled_from([0, 3]))
def test_all_ranks_run_the_program_of_one_bucket(load, ranks, drafts):
    """It holds what each rank has, and does not depend on which rank has what."""
    rows = 3
    scheduler = Scheduler(ranks, CACHE.num_pages, CACHE.page_size, rows, CACHE.max_tokens, 32)
    program = SampledSteps(ranks, rows, CACHE)
    runner = SimpleNamespace(
        cache=CACHE, mesh=make_mesh(ranks), program=program, deterministic=False
    )
    dispatcher = Dispatcher(runner, rows, drafts)
    overlap = OverlapConfig("on", 3)
    seen = Counter()
    for now in range(1000):
        for number, (prompt, new, at, _) in enumerate(load):
            if at == now:
                scheduler.add(Request(number, (7,) * prompt, SamplingParams(new)))
        propose = (lambda request: [1] * 3 * load[request.request_id][3]) if drafts else None
        plan = scheduler.schedule(propose)
        if not plan.has_work:
            scheduler.discard(plan)
            if now > 6:
                break
            continue
        bucket = dispatcher.bucket_of(plan)
        assert bucket in dispatcher.buckets
        for sequences in plan.ranks:
            lengths = [s.num_tokens for s in sequences]
            assert sum(lengths) <= bucket.tokens and len(lengths) <= bucket.sequences
            assert max(lengths, default=0) <= (1 + bucket.drafts if bucket.decode else 16)
        counts = plan.num_tokens[::-1], plan.num_sequences[::-1]
        turned = SimpleNamespace(
            num_tokens=counts[0], num_sequences=counts[1], has_drafts=plan.has_drafts,
            prefills=plan.prefills[::-1],
        )  # fmt: skip
        assert dispatcher.bucket_of(turned) == bucket
        assert overlap.micro_batches(bucket.tokens) == (3 if bucket.tokens > 1 else 1)
        seen[str(bucket).split()[0]] += 1
        count = len(plan.sampled)
        ones = np.ones(count, int)  # no draft is right
        scheduler.commit(plan, np.full((count, 1), 5), ones, ones == 0)
    assert not scheduler.has_work
    assert seen["prefill"] > 0 or all(prompt == 1 for prompt, *_ in load)


# Without a choice


def collectives(jaxpr: Any, choice: str = "") -> Iterator[tuple[str, str]]:
    """Each collective of a program, and the primitive that decides whether or how often it runs.

    A scan runs as often as its length says, which is static; the turns of a while loop and the
    branch of a conditional are data, except where the branch follows from the platform.
    """
    static: set[Any] = set()  # variables known when the program is compiled
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        read = [v for v in equation.invars if not hasattr(v, "val")]  # no literals
        if name == "platform_index" or (read and static.issuperset(read)):
            static.update(equation.outvars)
        if name.startswith(COLLECTIVES) or "all_to_all" in name:
            yield name, choice
        by_platform = name == "cond" and equation.invars[0] in static
        inner = choice or (name if name in ("cond", "while") and not by_platform else "")
        for value in equation.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                part = getattr(part, "jaxpr", part)  # of a closed one
                if hasattr(part, "eqns"):
                    yield from collectives(part, inner)


def step_jaxpr(bucket, monkeypatch, *, micro_batches, scanned=False, tensor=1, nodes=1, transport):
    mesh = make_mesh(4, tensor=tensor, nodes=nodes)
    model = load_model(Golden("qwen3_moe").folder, mesh=mesh, dtype=jnp.float32, scanned=scanned)
    overlap = OverlapConfig("on" if micro_batches > 1 else "off", max(2, micro_batches))
    runner = ModelRunner(model, CACHE, mesh=mesh, overlap=overlap, transport=transport)
    jitted = runner._jitted
    traced = lambda *step: SimpleNamespace(lower=jitted(*step).trace)  # noqa: E731
    monkeypatch.setattr(runner, "_jitted", traced)
    return runner.lower(bucket).jaxpr


@pytest.mark.parametrize(
    ("bucket", "micro_batches", "options"),
    [
        (Bucket(16, 4), 1, {}),
        (Bucket(16, 4), 2, {"scanned": True}),
        (Bucket(4, 4, True), 3, {"transport": "ragged_all_to_all"}),
        (Bucket(16, 4, True, 3), 2, {"transport": "all_gather"}),
        (Bucket(4, 4, True), 2, {"tensor": 2}),
        (Bucket(4, 4, True), 2, {"nodes": 2, "transport": "two_level"}),
    ],
    ids=str,
)
def test_no_collective_depends_on_data(bucket, micro_batches, options, monkeypatch):
    options = {"transport": "all_to_all"} | options
    jaxpr = step_jaxpr(bucket, monkeypatch, micro_batches=micro_batches, **options)
    found = list(collectives(jaxpr))
    assert len(found) >= 2 * micro_batches  # an exchange there and back
    assert {choice for _, choice in found} == {""}, found


def test_a_collective_that_depends_on_data_is_noticed():
    """The check of the check: in a branch, and in a loop of unknown length, also within a scan."""
    spec = PartitionSpec("nodes")
    mesh = make_mesh(2)

    def total(x):
        return jax.lax.psum(x, "nodes")

    def in_branch(x):
        return jax.lax.cond(x[0] > 0, total, lambda x: x, x)

    def in_loop(x):
        return jax.lax.while_loop(lambda x: x[0] < 9, total, x)

    def in_scan(x):
        return jax.lax.scan(lambda x, _: (in_loop(x), None), x, length=2)[0]

    def plain(x):
        return jax.lax.scan(lambda x, _: (total(x), None), x, length=2)[0]

    expected = {plain: "", in_branch: "cond", in_loop: "while", in_scan: "while"}
    for function, choice in expected.items():
        sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        jaxpr = jax.make_jaxpr(sharded)(jnp.ones(2))
        assert {found for _, found in collectives(jaxpr)} == {choice}

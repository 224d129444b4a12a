"""`deterministic`: a request has the same logits, bit by bit, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from tbo_jax import SamplingParams
from tbo_jax.engine.engine import Engine
from tbo_jax.sampling.logprobs import TokenLogprobs
from tests.engine.engines import small_llm
from tests.engine.loads import VOCABULARY
from tests.golden_cases import with_tokenizer


@dataclass(frozen=True)
class Case:
    model: str = "qwen3_moe"
    devices: int = 1
    mode: str = "off"
    waits: bool = False  # no look-ahead
    tensor: int = 1
    transport: str = "all_to_all"
    scanned: bool = False
    rounded: bool = False  # bfloat16, and 8 bits on the way to the experts
    options: bool = True  # of requests


CASES = [
    Case(options=False),
    pytest.param(Case(devices=4, mode="on"), marks=pytest.mark.slow),
    pytest.param(Case(), marks=pytest.mark.slow),
    pytest.param(Case(mode="on"), marks=pytest.mark.slow),
    pytest.param(Case(devices=4), marks=pytest.mark.slow),
    pytest.param(Case("gpt_oss", mode="on", waits=True), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", devices=2, rounded=True), marks=pytest.mark.slow),
    pytest.param(Case(devices=4, tensor=2, mode="on"), marks=pytest.mark.slow),
    pytest.param(
        Case(devices=2, transport="all_gather", scanned=True, mode="on"), marks=pytest.mark.slow
    ),
]


@dataclass(frozen=True)
class Asked:
    """A request that comes alone, and again and again amid others."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Found:
    """What a request got."""

    tokens: list[int]
    logits: list[np.ndarray]  # [V] of each token
    logprobs: list[TokenLogprobs | None]

    def check(self, alone: Found, *, whole: bool) -> None:
        """Equal to it, bit by bit, as far as this one came."""
        count = len(self.tokens)
        assert self.tokens == alone.tokens[:count] and (not whole or count == len(alone.tokens))
        assert self.logprobs == alone.logprobs[:count]
        for ours, theirs in zip(self.logits, alone.logits, strict=False):
            assert ours.tobytes() == theirs.tobytes()


@pytest.fixture(scope="module", params=CASES, ids=str)
def engine(tmp_path_factory, request) -> Engine:
    case = request.param
    with jax.numpy_dtype_promotion("standard"):  # the norm of Flax relies on it in bfloat16
        return small_llm(
            with_tokenizer(case.model, tmp_path_factory.mktemp("model")),
            case.devices,
            case.mode,
            tensor_parallel=case.tensor,
            transport=case.transport,
            scanned=case.scanned,
            dtype="bfloat16" if case.rounded else None,
            dispatch_dtype="int8" if case.rounded else None,
            request_options=case.options,
            max_sequences=3,
            num_pages=20,
            look_ahead=False if case.waits else None,
            deterministic=True,
        ).engine


@contextmanager
def watched(engine: Engine) -> Iterator[dict[tuple[int, int], np.ndarray]]:
    """The logits [V] of each token that is sampled, by request id and index of the token."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    dispatcher, run, start = engine._dispatcher, engine.runner.run, engine._dispatcher.start
    last = None

    def watched_run(*args):
        nonlocal last
        last, buffers = run(*args)
        return last, buffers

    def watched_start(plan, *args):
        indices = [request.num_generated for request in plan.sampled.requests]
        step = start(plan, *args)
        of, logits = plan.sampled, np.asarray(last.logits)
        rows = logits[of.ranks, of.places]
        seen.update(zip(zip(of.request_ids.tolist(), indices, strict=True), rows, strict=True))
        return step

    engine.runner.run, dispatcher.start = watched_run, watched_start
    yield seen
    del engine.runner.run, dispatcher.start


def found(seen: dict, request_id: int, events: list) -> Found:
    tokens = [event.token_id for event in events if event.token_id is not None]
    logits = [seen[request_id, index] for index in range(len(tokens))]
    logprobs = [event.logprobs for event in events if event.token_id is not None]
    return Found(tokens, logits, logprobs)


def random_params(rng: np.random.Generator, changing: bool) -> SamplingParams:
    """With `changing`, also with what changes logits or tells of them."""
    options: dict = {}
    if rng.random() < 0.5:
        options |= dict(temperature=1.0, top_p=0.95, seed=int(rng.integers(1000)))
    if changing and rng.random() < 0.2:
        options |= dict(repetition_penalty=1.3, frequency_penalty=0.2)
    if changing and rng.random() < 0.2:
        options |= dict(logprobs=2, logit_bias={int(rng.integers(VOCABULARY)): 2.0})
    return SamplingParams(max_new_tokens=int(rng.integers(1, 25)), ignore_eos=True, **options)


def alone(engine: Engine, asked: Asked) -> Found:
    """What it gets with nothing before it, beside it or kept."""
    engine.clear_prefix_cache()
    with watched(engine) as seen:
        request_id = engine.add(asked.prompt, asked.params)
        events = []
        while engine.has_work:
            events += engine.step()
    engine.pop(request_id)
    return found(seen, request_id, events)


def all_alone(engine: Engine, rng: np.random.Generator, count: int) -> list[tuple[Asked, Found]]:
    """Random requests; some begin as others do, or as others with what they generate."""
    known: list[tuple[Asked, Found]] = []
    for _ in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist()
        if known and rng.random() < 0.6:
            asked, got = known[rng.integers(len(known))]
            whole = [*asked.prompt, *got.tokens]
            prompt = [*whole[: rng.integers(1, min(len(whole), 40) + 1)], *prompt[:4]]
        asked = Asked(prompt, random_params(rng, engine.max_logprobs is not None))
        known.append((asked, alone(engine, asked)))
    return known


def check_amid_others(
    engine: Engine, rng: np.random.Generator, known: list[tuple[Asked, Found]], count: int
) -> None:
    """Run so many of them in random traffic: arrivals in bursts, aborts, whatever is kept."""
    pending = rng.integers(0, len(known), count).tolist()
    running: dict[int, tuple[int, list]] = {}
    with watched(engine) as seen:
        while pending or running:
            burst = int(rng.integers(1, 9)) if rng.random() < 0.25 else 0
            for _ in range(min(burst, len(pending))):
                number = pending.pop()
                asked, _ = known[number]
                running[engine.add(asked.prompt, asked.params)] = number, []
            for event in engine.step() if engine.has_work else ():
                if event.request_id in running:
                    running[event.request_id][1].append(event)
            ended = [i for i, (_, events) in running.items() if events and events[-1].finish_reason]
            aborted = [i for i in running if i not in ended and rng.random() < 0.005]
            for request_id in (*ended, *aborted):
                number, events = running.pop(request_id)
                engine.abort(request_id)  # which may be finished, by a later event
                engine.pop(request_id)
                got = found(seen, request_id, events)
                got.check(known[number][1], whole=request_id in ended)
                for key in [key for key in seen if key[0] == request_id]:
                    del seen[key]
            engine.check()


def check(engine: Engine, seed: int, distinct: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    known = all_alone(engine, rng, distinct)
    before = engine.counts()
    for _ in range(2):  # the second time with what the first one left
        check_amid_others(engine, rng, known, count)
    after = engine.counts()
    for name in ("preemptions", "evictions", "cached_tokens"):
        assert after[name] > before[name], name


def test_the_same_bits_alone_and_amid_others(engine, compilations):
    check(engine, 0, 12, 40)
    assert compilations() == 0
    assert engine.runner.num_compiled == len(engine.buckets) == 2


@pytest.mark.slow
def test_the_same_bits_of_a_thousand_requests(engine):
    check(engine, 1, 60, 1000)

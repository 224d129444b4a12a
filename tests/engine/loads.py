"""Random requests for an engine, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tbo_jax import SamplingParams
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.running import TokenEvent

VOCABULARY = 160
END_OF_SEQUENCE = list(range(0, VOCABULARY, 13))
STOPS = ("7 w1", "9", "w12 w", "w30", "3 w", "w")  # token i reads "w<i>"


@dataclass(frozen=True)
class Load:
    """Requests, each added once a number of events have come, and aborted after some of its own."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    add_at: list[int]
    abort_after: dict[int, int] = field(default_factory=dict)  # index -> its events


@dataclass
class Result:
    events: list[list[TokenEvent]]
    text: dict[int, str]  # of the finished ones


def random_load(rng: np.random.Generator, *, content: bool) -> Load:
    """With `content`, requests end by stop strings, end of sequence and aborts too."""
    count = int(rng.integers(2, 9))
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist() for _ in range(count)]
    params = []
    for _ in range(count):
        options = {}
        if rng.random() < 0.6:
            options = dict(temperature=1.0, top_p=0.95, seed=int(rng.integers(1000)))
        if content and rng.random() < 0.5:
            options["stop"] = tuple(rng.choice(STOPS, rng.integers(1, 3)).tolist())
        ignore = not content or bool(rng.random() < 0.5)
        new = int(rng.integers(1, 40))
        params.append(SamplingParams(max_new_tokens=new, ignore_eos=ignore, **options))
    if not content:
        return Load(prompts, params, [0] * count)
    add_at = np.sort(rng.integers(0, 12, count)) * rng.integers(0, 2)
    aborts = {i: int(rng.integers(0, 5)) for i in range(count) if rng.random() < 0.3}
    return Load(prompts, params, add_at.tolist(), aborts)


def run(engine: Engine, load: Load) -> Result:
    result = Result([[] for _ in load.prompts], {})
    ids: dict[int, int] = {}  # of the engine -> index
    aborted: set[int] = set()  # while they ran
    seen = 0
    while True:
        while len(ids) < len(load.prompts) and (
            load.add_at[len(ids)] <= seen or not engine.has_work
        ):
            index = len(ids)
            request_id = engine.add(load.prompts[index], load.params[index])
            ids[request_id] = index
            if load.abort_after.get(index) == 0:
                forget(engine, request_id)
        if not engine.has_work:
            if len(ids) == len(load.prompts):
                break
            continue
        for event in engine.step():
            index = ids[event.request_id]
            if index in aborted:  # one more of the same step
                continue
            seen += 1
            result.events[index].append(event)
            if event.finish_reason is not None:
                request, result.text[index] = engine.pop(event.request_id)
                given = [e.token_id for e in result.events[index] if e.token_id is not None]
                assert request.generated_token_ids == given
                assert (request.error is None) == (event.finish_reason != "error")
            elif load.abort_after.get(index) == len(result.events[index]):
                forget(engine, event.request_id)
                aborted.add(index)
        engine.check()
    assert engine.step() == []
    free = {rank.pages.num_free for rank in engine.scheduler._ranks}
    assert free == {engine.runner.cache.num_pages - 1}
    assert not engine._reader.running and not engine._reader._events
    return Result([[plain(e) for e in events] for events in result.events], result.text)


def forget(engine: Engine, request_id: int) -> None:
    engine.abort(request_id)  # which may be finished, by a later event of the same step
    engine.pop(request_id)


def plain(event: TokenEvent) -> TokenEvent:
    """Without the id, which counts on from load to load."""
    return TokenEvent(None, event.token_id, event.text, event.finish_reason)

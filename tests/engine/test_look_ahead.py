"""A step dispatched before the last one's tokens are read: the same tokens, text and counts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest

from tbo_jax import LLM, OverlapConfig, SamplingParams
from tbo_jax.engine.engine import Engine, TokenEvent
from tbo_jax.engine.sampler import compile_feed, compile_sampler
from tbo_jax.sampling import SamplingInputs
from tbo_jax.sharding import make_mesh
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)
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
    seen = 0
    while True:
        while len(ids) < len(load.prompts) and (
            load.add_at[len(ids)] <= seen or not engine.has_work
        ):
            index = len(ids)
            request_id = engine.add(load.prompts[index], load.params[index])
            ids[request_id] = index
            if load.abort_after.get(index) == 0:
                engine.abort(request_id)
        if not engine.has_work:
            if len(ids) == len(load.prompts):
                break
            continue
        for event in engine.step():
            seen += 1
            index = ids[event.request_id]
            result.events[index].append(event)
            if event.finish_reason is not None:
                request, result.text[index] = engine.pop(event.request_id)
                assert request.generated_token_ids == [e.token_id for e in result.events[index]]
            elif load.abort_after.get(index) == len(result.events[index]):
                engine.abort(event.request_id)
        engine.check()
    assert engine.step() == []
    assert set(engine.scheduler.num_free_pages) == {engine.runner.cache.num_pages - 1}
    return Result([[plain(e) for e in events] for events in result.events], result.text)


def plain(event: TokenEvent) -> TokenEvent:
    """Without the id, which counts on from load to load."""
    return TokenEvent(None, event.token_id, event.text, event.finish_reason)


def counts(engine: Engine) -> dict:
    ours = asdict(engine.statistics)
    for name in ("step_seconds", "compile_seconds", "steps_ahead"):
        del ours[name]
    return {**ours, "scheduler": asdict(engine.scheduler.statistics)}


@pytest.fixture(
    scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format
)
def engines(tmp_path_factory, request) -> tuple[Engine, Engine]:
    """Without and with, on the same compiled steps, and with few pages."""
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_SEQUENCE}))
    waiting = LLM(
        folder,
        devices=request.param,
        overlap=OverlapConfig("off"),
        max_sequences=3,
        max_tokens=16,
        page_size=4,
        num_pages=14,
        compilation_cache=False,
        look_ahead=False,
    ).engine
    ahead = Engine(
        waiting.runner,
        waiting.tokenizer,
        waiting.end_of_sequence,
        max_sequences=waiting.max_sequences,
        max_context=waiting.max_context,
    )
    ahead.warm_up()
    assert ahead.look_ahead and not waiting.look_ahead
    return waiting, ahead


def test_requests_that_end_by_length_give_the_same_tokens_and_counts(engines, compilations):
    waiting, ahead = engines
    for seed in range(12):
        load = random_load(np.random.default_rng(seed), content=False)
        assert run(ahead, load) == run(waiting, load)
    assert waiting.scheduler.statistics.preemptions > 0
    assert counts(ahead) == counts(waiting)
    assert compilations() == 0
    assert waiting.statistics.steps_ahead == 0
    assert 0.8 * ahead.statistics.steps < ahead.statistics.steps_ahead < ahead.statistics.steps


def test_requests_that_end_by_content_give_the_same_tokens_and_text(engines, compilations):
    """Stop strings, end of sequence, aborts, and requests that come later."""
    waiting, ahead = engines
    reasons = []
    for seed in range(100, 125):
        load = random_load(np.random.default_rng(seed), content=True)
        expected, found = run(waiting, load), run(ahead, load)
        assert found == expected
        reasons += [events[-1].finish_reason for events in found.events if events]
    assert all(reasons.count(reason) > 5 for reason in ("stop", "length", None))
    for name in ("generated_tokens", "prompt_tokens"):
        assert getattr(ahead.statistics, name) == getattr(waiting.statistics, name)
    finished = [engine.scheduler.statistics.finished for engine in engines]
    assert finished[0] == finished[1]
    assert compilations() == 0


def test_a_lone_request_that_stops_costs_no_step(engines):
    """The step ahead of its end of sequence is dropped, not waited for and not counted."""
    counted = []
    for engine in engines:
        before = engine.statistics.steps
        load = Load([GOLDEN.prompts[0]], [SamplingParams(max_new_tokens=30, stop=("w",))], [0])
        (events,) = run(engine, load).events
        assert events[-1].finish_reason == "stop"
        counted.append(engine.statistics.steps - before)
    assert counted == [1, 1]


def test_an_aborted_request_makes_room_for_the_next(engines):
    """Its row is still on the device when another one gets its pages."""
    _, ahead = engines
    wanted = SamplingParams(max_new_tokens=8, ignore_eos=True)
    (alone,) = run(ahead, Load([GOLDEN.prompts[0]], [wanted], [0])).events
    crowd = [ahead.add([7] * 20, wanted) for _ in range(3 * ahead.runner.mesh.size)]
    ahead.step()
    for request_id in crowd:
        ahead.abort(request_id)
    assert not ahead.has_work
    (found,) = run(ahead, Load([GOLDEN.prompts[0]], [wanted], [0])).events
    assert found == alone


def test_a_step_that_fails_ahead_leaves_a_usable_engine(engines, monkeypatch):
    _, ahead = engines
    wanted = SamplingParams(max_new_tokens=8, ignore_eos=True)
    (alone,) = run(ahead, Load([GOLDEN.prompts[0]], [wanted], [0])).events
    step, calls = ahead.runner.step, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return step(*args)

    monkeypatch.setattr(ahead.runner, "step", failing)
    ahead.add(GOLDEN.prompts[0], wanted)
    ahead.step()
    with pytest.raises(RuntimeError, match="no more"):
        ahead.step()
    monkeypatch.undo()
    assert not ahead.has_work
    (found,) = run(ahead, Load([GOLDEN.prompts[0]], [wanted], [0])).events
    assert found == alone


def test_the_programs_around_a_step():
    mesh = make_mesh(2)
    logits = np.zeros((2, 3, 10), np.float32)
    logits[0, range(3), [4, 2, 9]] = logits[1, range(3), [1, 0, 7]] = 1.0
    inputs = SamplingInputs.from_rows([], [], [], 3)
    stacked = [np.stack([leaf] * 2) for leaf in vars(inputs).values()]
    tokens, padded = compile_sampler(mesh, 3, 10, 5)(logits, SamplingInputs(*stacked))
    assert np.asarray(tokens).tolist() == [[4, 2, 9], [1, 0, 7]]
    assert np.asarray(padded).tolist() == [[4, 2, 9, 0, 0], [1, 0, 7, 0, 0]]
    ids = np.array([[-3, 8, -1, 0], [6, -2, 5, -3]], np.int32)
    fed = compile_feed(mesh, 4, 5)(ids, padded)
    assert np.asarray(fed).tolist() == [[9, 8, 4, 0], [6, 0, 5, 7]]

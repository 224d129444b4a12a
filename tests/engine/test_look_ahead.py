"""A step dispatched before the last one's tokens are read: the same tokens, text and counts."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from tbo_jax import SamplingParams
from tbo_jax.engine.engine import Engine
from tests.engine.engines import like, small_llm
from tests.engine.loads import END_OF_SEQUENCE, Load, forget, plain, random_load, run
from tests.engine.not_finite import (
    BAD,
    EMBEDDING,
    ERROR,
    check_until_bad,
    load_with_bad,
    poisoned,
)
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
WAITING = pytest.param(0, marks=pytest.mark.slow)  # test_speculation.py has it without look-ahead
GOLDEN = Golden(NAME)


def counts(engine: Engine) -> dict:
    ours = asdict(engine.statistics)
    for name in ("step_seconds", "wait_seconds", "compile_seconds", "steps_ahead"):
        del ours[name]
    return {**ours, "scheduler": asdict(engine.scheduler.statistics)}


@pytest.fixture(
    scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format
)
def engines(tmp_path_factory, request) -> tuple[Engine, Engine]:
    """Without and with, on the same compiled steps, and with few pages."""
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_SEQUENCE}))
    waiting = small_llm(
        folder, request.param, max_sequences=3, num_pages=14, look_ahead=False
    ).engine
    ahead = like(waiting)
    assert ahead.look_ahead and not waiting.look_ahead
    return waiting, ahead


def test_requests_that_end_by_length_give_the_same_tokens_and_counts(engines, compilations):
    waiting, ahead = engines
    for seed in range(8):
        load = random_load(np.random.default_rng(seed), content=False)
        assert run(ahead, load) == run(waiting, load)
    assert waiting.scheduler.statistics.preemptions > 0
    assert counts(ahead) == counts(waiting)
    assert compilations() == 0
    assert waiting.statistics.steps_ahead == 0
    assert 0.8 * ahead.statistics.steps < ahead.statistics.steps_ahead < ahead.statistics.steps


@pytest.mark.slow
def test_requests_that_end_by_content_give_the_same_tokens_and_text(engines, compilations):
    """Stop strings, end of sequence, aborts, and requests that come later."""
    waiting, ahead = engines
    reasons = []
    for seed in range(100, 115):
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
        forget(ahead, request_id)
    assert not ahead.has_work
    (found,) = run(ahead, Load([GOLDEN.prompts[0]], [wanted], [0])).events
    assert found == alone


def test_a_step_that_fails_ahead_loses_no_request(engines, monkeypatch):
    _, ahead = engines
    wanted = SamplingParams(max_new_tokens=8, ignore_eos=True)
    (alone,) = run(ahead, Load([GOLDEN.prompts[0]], [wanted], [0])).events
    step, calls = ahead.runner.run, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return step(*args)

    monkeypatch.setattr(ahead.runner, "run", failing)
    request_id = ahead.add(GOLDEN.prompts[0], wanted)
    events = ahead.step()
    with pytest.raises(RuntimeError, match="no more"):
        ahead.step()
    monkeypatch.undo()
    ahead.check()
    while ahead.has_work:
        events += ahead.step()
    ahead.pop(request_id)
    assert [plain(event) for event in events] == alone


# Logits that are not finite


@pytest.mark.parametrize("which", [WAITING, 1], ids=["waiting", "ahead"])
def test_logits_that_are_not_finite_end_one_request_only(engines, which, compilations):
    """Greedy and drawn, in chunks, queues and preemptions; its pages go to others."""
    waiting, engine = engines[0], engines[which]
    ends = []
    for seed in range(6):
        load = load_with_bad(np.random.default_rng(seed), content=seed % 2 == 1)
        clean = run(waiting, load)
        with poisoned(engine, EMBEDDING, BAD):
            found = run(engine, load)
        ends += check_until_bad(load, clean, found)
    assert min(ends.count(end) for end in ("at once", "later", "well")) > 5
    assert engine.scheduler.statistics.preemptions > 0
    assert compilations() == 0


@pytest.mark.parametrize("which", [0, 1], ids=["waiting", "ahead"])
def test_the_error_names_the_token(engines, which):
    engine = engines[which]
    wanted = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=30.0, seed=1)
    (clean,) = run(engine, Load([[1, 2, 3]], [wanted], [0])).events
    given = [1, 2, 3, *[event.token_id for event in clean]]
    place = next(i for i in range(5, 9) if given[i + 3] not in given[: i + 3])
    bad = given[place + 3]
    finished = dict(engine.scheduler.statistics.finished)
    with poisoned(engine, EMBEDDING, bad):
        request_id = engine.add([1, 2, 3], wanted)
        while engine.has_work:
            events = engine.step()
    assert [plain(event) for event in events] == [ERROR]
    request, text = engine.pop(request_id)
    assert request.error == f"logits are not finite at generated token {place + 1}"
    assert request.generated_token_ids == [event.token_id for event in clean[: place + 1]]
    assert text == "".join(event.text for event in clean[: place + 1])
    finished["error"] += 1
    assert engine.scheduler.statistics.finished == finished
    (again,) = run(engine, Load([[1, 2, 3]], [wanted], [0])).events
    assert again == clean


def test_an_expert_that_is_not_finite_harms_those_who_chose_it(engines):
    """The others share its blocks and messages, and are as they were."""
    _, ahead = engines
    wanted = SamplingParams(max_new_tokens=3, ignore_eos=True)
    load = Load([[i, i + 1] for i in range(24)], [wanted] * 24, [0] * 24)
    clean = run(ahead, load)
    with poisoned(ahead, ("layers", 1, "mlp", "down_proj"), (5, 0, 0)):
        found = run(ahead, load)
    well = []
    for ours, theirs in zip(found.events, clean.events, strict=True):
        given = [event for event in ours if event != ERROR]
        assert given == theirs[: len(given)]
        well.append(given == theirs)
    assert 3 < sum(well) < 21


def test_every_request_of_a_broken_model_says_so(engines):
    waiting, _ = engines
    load = random_load(np.random.default_rng(1), content=False)
    with poisoned(waiting, ("norm", "scale"), 0):
        assert run(waiting, load).events == [[ERROR]] * len(load.prompts)

"""Requests with a structure in the engine: their texts, and the same tokens however steps run."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tbo_jax import LLM, SamplingParams
from tbo_jax.engine.dispatch import DispatchedStep, Dispatcher
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.structured.structure import Structure
from tests.engine.engines import small_llm
from tests.engine.loads import Load, Result, run
from tests.engine.not_finite import EMBEDDING, poisoned
from tests.engine.structured.letters import with_letters
from tests.engine.structured.schemas import random_schema

NAME = "qwen3_moe"
VOCABULARY = 160
DRAFTS = 3
BUNDLED = Path(__file__).parents[2] / "examples" / "kjv-moe"
NESTED = 'start: "a" start "b" | "c"'
CHOICES = ["yes", "no", "name", "the end", "é漢"]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_letters(NAME, tmp_path_factory.mktemp("model"))


def make_llm(folder, devices=1, mode="off", **options) -> LLM:
    """With few rows and pages, so that requests wait and are preempted."""
    few = dict(max_sequences=2, max_batched_tokens=8, num_pages=12)
    return small_llm(folder, devices, mode, **few | options)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_llm(folder)


@pytest.fixture
def engine(llm, monkeypatch) -> Engine:
    """One that looks ahead, unless a test turns that off."""
    monkeypatch.setattr(llm.engine, "look_ahead", True)
    return llm.engine


@pytest.fixture(scope="module")
def speculating(folder) -> Engine:
    return make_llm(folder, speculate=DRAFTS).engine


@pytest.fixture(scope="module", params=[(4, "off"), (4, "on")], ids=str)
def elsewhere(folder, request) -> Engine:
    return make_llm(folder, *request.param).engine


# Texts


def random_structure(rng: random.Random) -> dict[str, Any]:
    """Fields of `SamplingParams`; a fifth of them let any text be."""
    pick = rng.randrange(5)
    if pick == 0:
        return {
            "regex": rng.choice(["[a-z ]{3,12}(, [0-9]{1,3}){0,3}", "(true|false|null)+!", ".é?"])
        }
    if pick == 1:
        return {"choice": CHOICES}
    if pick == 2:
        return {"json_schema": random_schema(rng)}
    if pick == 3:
        return {"grammar": NESTED}
    return {}


def is_allowed(text: str, params: SamplingParams) -> bool:
    """Whether a whole text is what its request asked for."""
    assert params.structure is not None
    name, value = params.structure
    if name == "regex":
        return re.fullmatch(value, text) is not None
    if name == "choice":
        return text in value
    if name == "grammar":
        found = re.fullmatch("(a*)c(b*)", text)
        return found is not None and len(found[1]) == len(found[2])
    if name == "json_object":
        return isinstance(json.loads(text), dict)
    schema = json.loads(value)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True


def structured_load(seed: int) -> Load:
    rng = random.Random(seed)
    prompts, params = [], []
    for _ in range(rng.randrange(3, 9)):
        prompts.append([rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))])
        options = random_structure(rng)
        if rng.random() < 0.8:
            options |= dict(temperature=rng.choice([1.0, 30.0]), seed=rng.randrange(1000))
        more = {
            "repetition_penalty": rng.uniform(0.5, 2),
            "frequency_penalty": rng.uniform(-2, 2),
            "logit_bias": {rng.randrange(VOCABULARY): rng.uniform(-3, 3) for _ in range(9)},
            "min_tokens": rng.randrange(1, 9),
            "stop": ("e", '",'),
            "logprobs": 2,
        }
        options |= {name: value for name, value in more.items() if rng.random() < 0.15}
        params.append(SamplingParams(max_new_tokens=rng.randrange(9, 30), **options))
    return Load(prompts, params, [0] * len(prompts))


def check_texts(load: Load, found: Result) -> int:
    """Assert that texts that ended by themselves are allowed; their number."""
    checked = 0
    for index, params in enumerate(load.params):
        reason = found.events[index][-1].finish_reason
        assert reason in ("stop", "length")
        if params.structure is not None and reason == "stop" and not params.stop:
            assert is_allowed(found.text[index], params), (found.text[index], params)
            checked += 1
    return checked


def drafting(load: Load, found: Result) -> Callable[[Sequence[int], int], list[int]]:
    """Proposes what is to come, and at times something else."""
    known = [p + [e.token_id for e in of] for p, of in zip(load.prompts, found.events)]

    def propose(tokens, most):
        coming = next(one for one in known if one[: len(tokens)] == list(tokens))
        drafts = coming[len(tokens) :][:most]
        return [(d + 1) % VOCABULARY if (len(tokens) + d) % 7 == 0 else d for d in drafts]

    return propose


def preemptions(engine: Engine) -> int:
    return engine.scheduler.statistics.preemptions


def test_the_same_tokens_ahead_of_those_before(engine, compilations):
    """With requests that are preempted in between."""
    before, checked = (preemptions(engine), engine.statistics.steps_ahead), 0
    for seed in range(8):
        load = structured_load(seed)
        engine.look_ahead = False
        expected = run(engine, load)
        engine.look_ahead = True
        assert run(engine, load) == expected
        checked += check_texts(load, expected)
    assert checked > 10
    assert preemptions(engine) - before[0] > 3
    assert engine.statistics.steps_ahead - before[1] > 150
    assert compilations() == 0


@slow
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "waiting"])
def test_the_same_tokens_with_drafts_of_the_device(engine, speculating, ahead, compilations):
    """These are known to the host, which masks what may follow them."""
    before = preemptions(speculating), speculating.statistics.accepted_tokens
    speculating.look_ahead = ahead
    for seed in range(60, 90):
        load = structured_load(seed)
        expected = run(engine, load)
        check_texts(load, expected)
        assert run(speculating, load) == expected
        speculating.check()
    speculating.look_ahead = True
    assert preemptions(speculating) > before[0]
    assert speculating.statistics.accepted_tokens - before[1] > 20
    assert compilations() == 0


@slow
def test_the_same_tokens_with_drafts(engine, speculating, monkeypatch, compilations):
    monkeypatch.setattr(speculating, "look_ahead", False)
    before = preemptions(speculating)
    for seed in range(20, 40):
        load = structured_load(seed)
        expected = run(engine, load)
        check_texts(load, expected)
        monkeypatch.setattr(speculating, "_propose", drafting(load, expected))
        assert run(speculating, load) == expected
    assert preemptions(speculating) > before
    assert speculating.statistics.accepted_tokens > 100
    assert compilations() == 0


@slow
def test_the_same_tokens_on_other_devices_and_with_overlap(engine, elsewhere, compilations):
    for seed in range(40, 60):
        load = structured_load(seed)
        expected = run(engine, load)
        check_texts(load, expected)
        assert run(elsewhere, load) == expected
    assert elsewhere.statistics.steps_ahead > 100
    assert compilations() == 0


def test_texts_of_random_schemas_are_valid(engine):
    schemas = [random_schema(random.Random(seed)) for seed in range(10)]
    params = [
        SamplingParams(json_schema=schema, max_new_tokens=40, temperature=30.0, seed=seed)
        for seed, schema in enumerate(schemas)
    ]
    load = Load([[5]] * len(params), params, [0] * len(params))
    assert check_texts(load, run(engine, load)) > 7


@slow
def test_texts_of_500_random_schemas_are_valid():
    """With the vocabulary of a real model, whose tokens are parts of characters too."""
    llm = small_llm(BUNDLED, max_sequences=16, max_batched_tokens=64, page_size=16)
    schemas = [random_schema(random.Random(seed)) for seed in range(500)]
    params = [
        SamplingParams(json_schema=schema, max_new_tokens=200, temperature=50.0, seed=seed)
        for seed, schema in enumerate(schemas)
    ]
    found = llm.generate([[5]] * len(params), params)
    ended = [(p, done.text) for p, done in zip(params, found) if done.finish_reason == "stop"]
    assert all(done.error is None for done in found)
    assert all(is_allowed(text, wanted) for wanted, text in ended)
    assert len(ended) > 490
    assert len({text for _, text in ended}) > 300


def test_the_next_step_is_started_before_the_tokens_are_read(engine, monkeypatch):
    """And its tokens are sampled after."""
    order = []

    def note(owner, name):
        original = getattr(owner, name)

        def noted(*args):
            order.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, noted)

    note(Dispatcher, "start")
    note(Dispatcher, "sample")
    note(DispatchedStep, "read")
    wanted = SamplingParams(regex="[a-z]{4}", max_new_tokens=9)
    run(engine, Load([[5]], [wanted], [0]))
    assert order[:2] == ["start", "sample"]
    assert order[2:8] == ["start", "read", "sample"] * 2
    order.clear()
    plain = SamplingParams(max_new_tokens=3, ignore_eos=True)
    run(engine, Load([[5]], [plain], [0]))
    assert order == ["start", "sample"] * 2 + ["read", "start", "sample", "read", "read"]


def test_a_step_without_structures_runs_no_mask(engine, monkeypatch):
    monkeypatch.setattr(engine._dispatcher, "_masks", None)
    wanted = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert len(run(engine, Load([[5]], [wanted], [0])).events[0]) == 4


# Ends


def test_a_complete_text_ends_without_another_step(llm):
    engine = llm.engine
    (done,) = llm.generate([[5]], SamplingParams(choice=["no"], min_tokens=9))
    assert (done.text, done.finish_reason) == ("no", "stop")
    before = engine.statistics.steps
    tokens = engine.tokenizer.encode("no")
    assert done.token_ids == tokens
    llm.generate([[5]], SamplingParams(choice=["no"]))
    assert engine.statistics.steps - before == len(tokens)


def test_an_end_of_sequence_ends_a_text_that_could_go_on(llm):
    wanted = [
        SamplingParams(regex="[ab]+", max_new_tokens=40, temperature=30.0, seed=seed)
        for seed in range(12)
    ]
    found = llm.generate([[5]] * 12, wanted)
    assert all(re.fullmatch("[ab]+", done.text) for done in found)
    reasons = [done.finish_reason for done in found]
    assert reasons.count("stop") > 5
    (cut,) = llm.generate([[5]], SamplingParams(regex="a{30}", max_new_tokens=3))
    assert cut.finish_reason == "length" and set(cut.text) == {"a"}
    (kept,) = llm.generate([[5]], SamplingParams(regex="a{1,30}", logit_bias={0: 100}))
    assert (kept.text, kept.finish_reason) == (kept.text, "stop") and "a" in kept.text


def test_stops_of_a_request_cut_its_text(llm):
    (done,) = llm.generate([[5]], SamplingParams(choice=["abc abc"], stop="c a"))
    assert (done.text, done.finish_reason) == ("ab", "stop")
    (space,) = llm.engine.tokenizer.encode(" ")
    (done,) = llm.generate([[5]], SamplingParams(choice=["abc abc"], stop_token_ids=[space]))
    assert (done.text, done.finish_reason) == ("abc", "stop")


def test_any_object_of_json(llm):
    wanted = [
        SamplingParams(json_object=True, max_new_tokens=60, temperature=3.0, seed=seed)
        for seed in range(12)
    ]
    found = llm.generate([[5]] * 12, wanted)
    assert all(done.text.startswith("{") for done in found)
    ended = [done for done in found if done.finish_reason == "stop"]
    assert ended and all(is_allowed(done.text, wanted[0]) for done in ended)


def test_several_completions_and_their_log_probabilities(llm):
    """Those of the model, whatever is masked."""
    wanted = dict(choice=CHOICES, temperature=30.0, seed=3)
    (first,) = llm.generate([[5]], SamplingParams(n=4, logprobs=2, **wanted))
    together = [first, *first.others]
    assert all(done.text in CHOICES for done in together)
    assert len({done.text for done in together}) > 1
    for done in together:
        assert [known.token_id for known in done.logprobs] == done.token_ids
        assert max(known.rank for known in done.logprobs) > 2


# Errors


def test_what_cannot_be_followed_ends_one_request_only(engine):
    """No token has a byte of the text, which is found once it is near."""
    good = SamplingParams(regex="[a-z]{8}", max_new_tokens=20)
    bad = SamplingParams(choice=["ab\U0001f600"], max_new_tokens=20)
    assert (
        check_texts(Load([[5]], [good], [0]), expected := run(engine, Load([[5]], [good], [0])))
        == 1
    )
    load = Load([[5], [6], [5]], [good, bad, good], [0, 0, 0])
    found = run(engine, load)
    assert found.events[0] == found.events[2] == expected.events[0]
    assert found.text[1] == "ab" and found.events[1][-1].finish_reason == "error"
    request_id = engine.add([6], bad)
    while engine.has_work:
        engine.step()
    error = str(engine.pop(request_id)[0].error)
    assert error.startswith("SamplingParams.choice cannot be followed at generated token ")
    assert "no token has the text that may follow" in error


@slow
@pytest.mark.parametrize("count", range(3, 8))
def test_what_cannot_be_followed_amid_drafts(speculating, monkeypatch, count):
    """The tokens before count, the error comes after them, and the other request goes on."""
    wanted = SamplingParams(regex="[xz]{12}", max_new_tokens=20)
    load = Load([[5], [6]], [wanted] * 2, [0] * 2)
    expected = run(speculating, load)
    monkeypatch.setattr(speculating, "look_ahead", False)
    monkeypatch.setattr(speculating, "_propose", drafting(load, expected))
    push, first = Structure.push, []

    def limited(self, token):
        first[:] = first or [self]
        if self is first[0] and self._num_tokens == count:
            self._fail("no more")
        return push(self, token)

    monkeypatch.setattr(Structure, "push", limited)
    found = run(speculating, load)
    (ended,) = (i for i in (0, 1) if found.events[i][-1].finish_reason == "error")
    assert found.events[1 - ended] == expected.events[1 - ended]
    assert found.events[ended][:-1] == expected.events[ended][:count]
    assert found.text[ended] == expected.text[ended][:count]


def test_what_rules_out_each_other_is_told(llm):
    (n,) = llm.engine.tokenizer.encode("n")
    (done,) = llm.generate([[5]], SamplingParams(choice=["yes"], allowed_token_ids=[n]))
    expected = "logits are not finite at generated token 0, or choice allows what is ruled out"
    assert (done.finish_reason, done.error) == ("error", expected)
    (done,) = llm.generate(
        [[5]], SamplingParams(choice=["no", "yes"], allowed_token_ids=[n, n + 1])
    )
    assert (done.finish_reason, done.text) == ("stop", "no")


def test_logits_that_are_not_finite_are_found_under_a_mask(engine):
    wanted = SamplingParams(regex="[a-z]{8}", max_new_tokens=20)
    clean = run(engine, Load([[5]], [wanted], [0]))
    with poisoned(engine, EMBEDDING, [7]):
        found = run(engine, Load([[5], [7]], [wanted, wanted], [0, 0]))
    assert found.events[0] == clean.events[0]
    assert [event.finish_reason for event in found.events[1]] == ["error"]


def test_an_option_that_cannot_be_had_costs_its_prompt_only(llm):
    asked = [SamplingParams(regex="("), SamplingParams(regex="a")]
    bad, good = llm.generate([[5], [5]], asked)
    assert "SamplingParams.regex cannot be used: invalid regex" in bad.error
    assert good.text == "a"


def test_a_grammar_is_compiled_while_others_decode(engine, monkeypatch):
    """Whoever wants the engine meanwhile gets it."""
    structure, met = engine._grammars.structure, []

    def slow_one(params):
        other = threading.Thread(target=lambda: met.append(engine.counts()))
        other.start()
        other.join(60)
        return structure(params)

    monkeypatch.setattr(engine._grammars, "structure", slow_one)
    assert run(engine, Load([[5]], [SamplingParams(regex="a")], [0])).text == {0: "a"}
    assert len(met) == 1


def test_a_step_that_fails_forgets_no_token(engine, monkeypatch):
    """Its requests are where their tokens lead, when they are computed anew."""
    wanted = SamplingParams(regex="[a-z]{3}(, [a-z]{2}){5}", max_new_tokens=40)
    load = Load([[5, 6]], [wanted], [0])
    expected = run(engine, load).events[0]
    sample, calls = Dispatcher.sample, []

    def failing(*args):
        calls.append(args)
        if len(calls) in (4, 9):
            raise RuntimeError("no more")
        return sample(*args)

    monkeypatch.setattr(Dispatcher, "sample", failing)
    request_id = engine.add([5, 6], wanted)
    events = []
    while engine.has_work:
        try:
            events += engine.step()
        except RuntimeError as error:
            assert "no more" in str(error)
    engine.pop(request_id)
    assert len(calls) > len(expected) + 2
    assert [e.token_id for e in events] == [e.token_id for e in expected]


def test_requests_that_are_aborted_leave_the_others_alone(engine):
    params = [SamplingParams(regex="[a-z]{9}", temperature=1.0, seed=s) for s in range(6)]
    load = Load([[5, s] for s in range(6)], params, [0] * 6)
    expected = run(engine, load)
    load = Load(load.prompts, params, load.add_at, {1: 0, 2: 2, 4: 1})
    found = run(engine, load)
    for index in (0, 3, 5):
        assert found.events[index] == expected.events[index]
